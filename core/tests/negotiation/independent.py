"""
A second reading of manifests, which shares no code with the project: its own small reader of TOML, and its own rules of
what serves. Random requests compare the two.
"""

from __future__ import annotations

import re
from itertools import product

TERMS = ("block_size", "kv_layout", "kv_cache_form")
LEVELS = ("never", "single_token_decode", "uniform_batch", "always")
FLAGS = {
    "sinks",
    "causal",
    "custom_mask",
    "mm_prefix",
    "attn_bias",
    "latent",
    "kv_sharing",
    "kv_in_cache",
    "paged",
    "cascade",
    "return_lse",
    "batch_invariant",
    "per_head_scales",
    "unquantized_queries",
}
NUMBERS = {
    "head_size",
    "num_q_heads",
    "num_kv_heads",
    "head_size_v",
    "sliding_window",
    "attention_chunk",
    "topk",
    "block_size",
    "decode_query_len",
    "dcp_size",
    "num_multiprocessors",
    "gqa_ratio",
}
SETS = {"phases", "features"}
OPEN = {
    "num_q_heads",
    "num_kv_heads",
    "device_name",
    "num_multiprocessors",
    "gqa_ratio",
    "query_lens_cpu_kind",
    "unquantized_queries",
}
NEUTRAL = {
    **dict.fromkeys(FLAGS, False),
    "attn_type": "decoder",
    "phases": ("prefill", "decode"),
    "features": (),
    "cudagraph": "never",
    "decode_query_len": 1,
    "dcp_size": 1,
    "seq_lens_cpu_kind": "exact",
    "query_lens_cpu_kind": "exact",
}
ALIASES = {"fp8": "fp8_e4m3"}

# --- TOML, as far as the manifests use it --------------------------------------------------------------------------

TOKEN = re.compile(r"""\s*(?:\#[^\n]*\s*)*("(?:[^"\\]|\\.)*"|'[^']*'|[A-Za-z0-9_.\-]+|[\[\]{}=,])""")


def read(text):
    """Return the tables of a document."""
    root = {}
    here = root
    lines = text.split("\n")
    while lines:
        line = lines.pop(0).strip()
        header = re.match(r"(\[\[?)\s*([^\]]+?)\s*\]", line)
        if not line or line.startswith("#"):
            continue
        if header:
            here = descend(root, header[2].split("."), listed=header[1] == "[[")
            continue
        while not is_whole(line):
            line += "\n" + lines.pop(0)
        key, _, rest = line.partition("=")
        put(here, key.strip().strip('"'), parse(tokens_of(rest)))
    return root


def descend(root, names, *, listed):
    for place, name in enumerate(names):
        last = place == len(names) - 1
        if last and listed:
            root.setdefault(name, []).append({})
        root = root.setdefault(name, {})
        root = root[-1] if isinstance(root, list) else root
    return root


def put(table, key, value):
    assert key not in table, key
    table[key] = value


def is_whole(text):
    bare = re.sub(r'"(?:[^"\\]|\\.)*"|\'[^\']*\'|#[^\n]*', "", text)
    return bare.count("[") + bare.count("{") == bare.count("]") + bare.count("}")


def tokens_of(text):
    found, at = [], 0
    while match := TOKEN.match(text, at):
        found.append(match[1])
        at = match.end()
    rest = re.sub(r"#[^\n]*", "", text[at:]).strip()
    assert not rest, rest
    return found


def parse(tokens):
    word = tokens.pop(0)
    if word == "[":
        items = []
        while tokens[0] != "]":
            items.append(parse(tokens))
            if tokens[0] == ",":
                tokens.pop(0)
        tokens.pop(0)
        return items
    if word == "{":
        table = {}
        while tokens[0] != "}":
            key = tokens.pop(0).strip('"')
            assert tokens.pop(0) == "="
            put(table, key, parse(tokens))
            if tokens[0] == ",":
                tokens.pop(0)
        tokens.pop(0)
        return table
    if word[0] in "\"'":
        return word[1:-1]
    return (
        {"true": True, "false": False}[word] if word in ("true", "false") else float(word) if "." in word else int(word)
    )


# --- what serves ---------------------------------------------------------------------------------------------------


class Variant:
    """One variant of a document that was read."""

    def __init__(self, document, name):
        own = document["variants"][name]
        self.id = f"{document['backend']['name']}/{name}"
        self.declared, self.open_names = {}, set()
        for table in (document.get("supports", {}), own.get("supports", {})):
            listed = table.get("features", [])
            self.declared |= {item: ANY for item in listed if "." not in item}
            self.declared |= {key: value for key, value in table.items() if key != "features"}
            self.open_names |= {item for item in listed if "." in item}
        if "paged" in self.declared:
            self.declared.setdefault("kv_layout", "NHD")
            self.declared.setdefault("kv_cache_form", "joint")
        self.rules = [*document.get("rules", []), *own.get("rules", [])]

    def serves(self, requirements, device):
        """Whether it serves, were all that it requires installed in a version that no rule is about."""
        return self.settled(requirements, device) is not None

    def settled(self, requirements, device):
        """The terms that it agrees to, or None where it does not serve."""
        facts = facts_of(requirements, device)
        # Lengths that the host does not have are read from the device, and are exact then: query lengths always.
        read = facts | {"seq_lens_cpu_kind": "exact", "query_lens_cpu_kind": "exact"}
        for exact in [facts] * (facts["query_lens_cpu_kind"] == "exact") + [read]:
            tried = self.all_terms(exact) if self.declares_all(exact) else ()
            terms = next((terms for terms in tried if self.allows(exact | terms)), None)
            if terms is not None:
                levels = [{"cudagraph": level} for level in LEVELS[LEVELS.index(facts["cudagraph"]) :]]
                served = [each for each in levels if self.declares_all(exact | each)]
                highest = [each for each in served if self.allows(exact | terms | each)][-1]
                return {**dict.fromkeys(TERMS), **terms, **highest, "reads_lengths": exact is not facts}
        return None

    def allows(self, facts):
        return all(rule_allows(rule, facts) for rule in self.rules)

    def declares_all(self, facts):
        return all(self.declares(name, facts) for name in facts if name not in TERMS)

    def declares(self, name, facts):
        value = facts[name]
        if name == "features":
            return set(value) <= self.open_names
        if name == "phases":
            return name not in self.declared or admits(name, self.declared[name], value, facts)
        if name == "vendor" and name not in self.declared:
            types = as_list(self.declared["device_type"])
            return value is None or value == "nvidia" or "cuda" not in types
        if not is_requested(name, facts) and name not in ("head_size", "dtype", "device_type"):
            return True
        if name not in self.declared:
            return name in OPEN
        return admits(name, self.declared[name], value, facts)

    def all_terms(self, facts):
        if not facts["paged"]:
            return [{}]
        matters = any("block_size" in {**rule["when"], **rule.get("need", {})} for rule in self.rules)
        known = {"block_size": range(1, 1025), "kv_layout": ["NHD", "HND"]}
        known["kv_cache_form"] = ["joint", "interleaved", "split", "packed", "independent"]
        choices = {
            name: ["latent"]
            if name == "kv_cache_form" and facts["latent"]
            else preferred(name, self.declared[name], facts[name], known[name], facts)
            for name in TERMS
        }
        if not matters:
            choices["block_size"] = choices["block_size"][:1]
        return [dict(zip(TERMS, terms, strict=True)) for terms in product(*choices.values())]


def preferred(name, declared, wanted, values, facts):
    """The values that are declared: the first of each alternative, then all of them, rising."""
    values = [wanted] if wanted else values
    each = [[value for value in values if admits_one(name, part, value, facts)] for part in as_list(declared)]
    rising = sorted(value for found in each for value in found)
    return list(dict.fromkeys([*(found[0] for found in each if found), *rising]))


ANY = {"any": True}


def facts_of(requirements, device):
    names = [name for name in requirements.__slots__ if not name.startswith("_") and name != "late"]
    facts = {name: getattr(requirements, name) for name in names}
    capability = device.compute_capability
    return facts | {
        "device_type": device.type,
        "vendor": device.vendor,
        "compute_capability": (capability.major, capability.minor) if capability else None,
        "gqa_ratio": requirements.num_q_heads // requirements.num_kv_heads,
    }


def is_requested(name, facts):
    value = facts[name]
    follows = {
        "head_size_v": facts["head_size"],
        "kv_cache_dtype": facts["dtype"],
        "causal": facts["attn_type"] == "decoder",
    }
    if name in ("head_size", "num_q_heads", "num_kv_heads", "dtype"):
        return True
    return value != follows.get(name, NEUTRAL.get(name))


def as_list(value):
    return value if isinstance(value, list) else [value]


def admits(name, declared, value, facts):
    if name in SETS and declared is not ANY:
        return set(value) <= set(as_list(declared))
    return any(admits_one(name, part, value, facts) for part in as_list(declared))


def admits_one(name, part, value, facts):
    if part is ANY:
        return True
    if isinstance(part, dict):
        low, high = (None if part.get(end) is None else order(name, part[end]) for end in ("min", "max"))
        here = order(name, value)
        inside = (low is None or low <= here) and (high is None or here <= high)
        return inside and (part.get("multiple_of") is None or value % part["multiple_of"] == 0)
    if name == "compute_capability":
        major, minor, suffix = re.fullmatch(r"(\d+)\.(\d)([af]?)", part).groups()
        return value == (int(major), int(minor)) or (
            suffix == "f" and value[0] == int(major) and value[1] >= int(minor)
        )
    if name == "kv_cache_dtype" and part == "auto":
        return value == facts["dtype"]
    return ALIASES.get(part, part) == value


def order(name, value):
    if name == "cudagraph":
        return LEVELS.index(value)
    if name == "compute_capability" and isinstance(value, str):
        return tuple(map(int, value.split(".")))
    return value


def rule_allows(rule, facts):
    if not all(holds(name, wanted, facts, absent=False) for name, wanted in rule["when"].items()):
        return True
    need = rule.get("need", {})
    return bool(need) and all(holds(name, wanted, facts, absent=True) for name, wanted in need.items())


def holds(name, wanted, facts, *, absent):
    if name == "installed":
        return absent  # needed versions are there, and none that a rule refuses
    if isinstance(wanted, bool) and name not in FLAGS:
        return is_requested(name, facts) is wanted
    if facts.get(name) is None:  # no device here has an LLVM target
        return absent
    return admits(name, wanted, facts[name], facts)
