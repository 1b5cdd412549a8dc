"""`bass distill`: its options and its end. Nothing heavy is imported before the command runs. Not
here: what is done (distill/command.py)."""

from __future__ import annotations

from bass_cli.cli.exit_codes import exit_codes
from bass_cli.cli.flags import DRAFTING, MACHINE, MODELS, OUTPUT, SAMPLING, Flag
from bass_cli.cli.options import OPTIONS, takes
from bass_cli.config.args import DistillArgs
from bass_cli.io import terminal
from bass_cli.io.console import Screen

_DATA, _TRAINING = "The target's samples", "Training"
_FLAGS = {
    "draft": OPTIONS["draft"]._replace(
        text="What the pair drafts with: a model is what the new draft is made of, if --from and "
        "--layers are not given"
    ),
    "source": Flag(
        "Make the draft of this small model of the target's family (like --model)",
        MODELS,
        "MODEL",
        "the pair's draft",
        flag="--from",
    ),
    "layers": Flag(
        "Make it of the target's first N layers",
        MODELS,
        "N",
        "a quarter of them, where there is no other model",
    ),
    "prompts": Flag(
        "Prompts to draw samples of (as bass generate reads them)",
        _DATA,
        "FILE",
        "none: a chat model writes users' turns too and answers them; half of the tokens go on "
        "from the beginning of a text",
    ),
    "chat": Flag(
        "With --prompts: put them into the model's chat template; without: only chats, or only "
        "texts",
        _DATA,
        default="both; prompts where they have messages",
        flag="--chat/--no-chat",
    ),
    "prompt_column": OPTIONS["prompt_column"]._replace(group=_DATA),
    "limit": OPTIONS["limit"]._replace(group=_DATA),
    "tokens": Flag(
        "Draw about N tokens, from the prompts of a file again and again",
        _DATA,
        "N",
        "what --steps can learn from in two passes, at most 50000; on a GPU 10000000",
    ),
    "n": OPTIONS["n"]._replace(
        text="Samples of each prompt; with --prompts and without --tokens, no more are drawn",
        group=_DATA,
        default="4; fewer for some hundreds of --tokens",
    ),
    "max_new_tokens": OPTIONS["max_new_tokens"]._replace(
        group=_DATA, default="384; a quarter of --tokens if that is less"
    ),
    "temperature": OPTIONS["temperature"]._replace(
        text="Of the samples", group=_DATA, default="0.9, between those that drafts are used at"
    ),
    "seed": OPTIONS["seed"]._replace(text="Fixes samples and training", group=SAMPLING),
    "batch_size": OPTIONS["batch_size"]._replace(
        text="Rows decoded at once while samples are drawn", group=MACHINE
    ),
    "draft_length": Flag(
        "Train drafts of up to N tokens, 2 to 32: one guess behind the text, and masks for the "
        "others",
        DRAFTING,
        "N",
        "8",
    ),
    "minutes": Flag("Train for so long", _TRAINING, "NUMBER", "no limit"),
    "steps": Flag(
        "Train for so many steps", _TRAINING, "N", "two passes over the samples, without --minutes"
    ),
    "learning_rate": Flag(
        "Its peak; it rises at first, and falls in half a cosine", _TRAINING, "NUMBER", "0.0001"
    ),
    "windows": Flag("Windows of text a step", _TRAINING, "N", "16", flag="--train-batch"),
    "window_tokens": Flag("Tokens of a window, a multiple of 8", _TRAINING, "N", "512"),
    "ray": OPTIONS["ray"]._replace(
        text="Draw and train with actors on Ray, one a GPU: of this machine (local), or of a "
        "cluster that it is a node of (auto, or HOST:PORT), with --out in a folder that all nodes "
        "share; needs bass-cli[ray]"
    ),
    "actors": OPTIONS["actors"],
    "dtype": OPTIONS["dtype"]._replace(takes="auto|bf16|fp32"),
    "out": Flag(
        "The folder for samples, checkpoint, draft, pair file and report; given again, the same "
        "command goes on with it",
        OUTPUT,
        "DIR",
    ),
    "overwrite": Flag("Begin anew in a folder that distill began", OUTPUT),
}


@takes(DistillArgs, _FLAGS)
def distill(args: DistillArgs) -> None:
    """Make a draft that guesses many tokens in one pass (parallel:MODEL) for a target, from its own
    samples.

    \b
    Examples:
      bass distill --pair mine.yaml --out drafts --minutes 10
      bass distill --model big.gguf --from small.gguf --out drafts
      bass distill --pair mine.yaml --out drafts --ray local --actors 8

    The folder gets a pair file for bass generate --pair. Given again after an interruption, the
    same command goes on where it was.
    """
    screen = Screen(args.quiet, document=args.json_document)
    with exit_codes(screen, "interrupted; the same command goes on from here"):
        if not args.out:
            from bass_cli.errors import UserError

            raise UserError("--out (or BASS_OUT): a folder for what is made is needed")
        from bass_cli.distill.command import run

        document = run(args, screen)
        if args.json_document:
            terminal.line(document, stdout=True)
