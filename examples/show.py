"""Show a few samples of each prompt from a file that `bass generate` wrote: python examples/show.py FILE [COUNT]."""

import json
import sys
import textwrap


def main(path: str, count: int = 2) -> None:
    best: dict[str, list[dict]] = {}
    with open(path, encoding="utf-8") as lines:
        for line in lines:
            row = json.loads(line)
            best.setdefault(row["id"], []).append(row)
    for prompt, rows in best.items():
        rows.sort(key=lambda row: -(row["mean_logprob"] or 0.0))
        print(f"\n{prompt}: {len(rows)} samples, the {min(count, len(rows))} with the highest mean log-probability")
        for row in rows[:count]:
            text = textwrap.shorten(row["text"], 300, placeholder=" ...")
            about = f"{row['tokens']} tokens, {row['finish_reason']}, mean log-probability {row['mean_logprob']:.2f}"
            print(textwrap.fill(text, 100, initial_indent="  > ", subsequent_indent="    "))
            print(f"    ({about}, {row['accepted']} of {row['drafted']} drafts accepted in {row['rounds']} rounds)")


if __name__ == "__main__":
    main(sys.argv[1], *map(int, sys.argv[2:3]))
