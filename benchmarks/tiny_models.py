"""Tiny random Llama models in the real format, with a tokenizer of single bytes. Used by
compare_jobs.py and small_jobs.py; not a script.
"""


def write_model(folder, *, seed=0, like=None, template=None, **sizes):
    """Write a model and its tokenizer; return the model.

    seed: of the weights, unless `like`, a model with the same sizes and more layers, has them.
    template: the chat template. sizes: fields of LlamaConfig.
    """
    import tokenizers
    import torch
    import transformers

    transformers.logging.disable_progress_bar()
    texts = ["<pad>", "</s>", *sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())]
    inner = tokenizers.Tokenizer(
        tokenizers.models.BPE({text: number for number, text in enumerate(texts)}, [])
    )
    inner.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = tokenizers.decoders.ByteLevel()
    ids = {"vocab_size": len(texts), "eos_token_id": 1, "pad_token_id": 0, "bos_token_id": None}
    torch.manual_seed(seed)
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**ids, **sizes))
    if like is not None:
        model.load_state_dict(like.state_dict(), strict=False)
    model.save_pretrained(folder)
    wrapped = transformers.PreTrainedTokenizerFast(
        tokenizer_object=inner, eos_token="</s>", pad_token="<pad>"
    )
    wrapped.chat_template = template
    wrapped.save_pretrained(folder)
    return model
