"""The check of packing.yaml. It runs in the sandbox, once for each sample."""

import json


def fits(answer, record):
    """Return whether the answer packs known things, enough of them, within the limit.

    Args:
        answer: the text that the rules of `extract` found, or the whole text if they found none.
        record: the problem's record in packing.jsonl.
    """
    try:
        packed = json.loads(answer)["packed"]
    except (ValueError, KeyError, TypeError):
        return False
    things = record["things"]
    if not isinstance(packed, list) or not all(isinstance(one, str) for one in packed):
        return False
    if len(set(packed)) != len(packed) or not set(packed) <= things.keys():
        return False
    weight = sum(things[one] for one in packed)
    return len(packed) >= record["least"] and weight <= record["limit"] + 1e-9
