"""
Valid calls with a few things changed at random: each is served as its tensors say, or refused before anything is
written.

What is right is computed from the tensors of the call as they were given, with the float64 oracle: slots are written,
then every request reads its blocks.
"""

from __future__ import annotations

import random
from collections import Counter
from contextlib import suppress

import pytest
import torch

import attnplug
from attnplug.contract import Batch, Layer, Limits, split_kv
from attnplug.errors import AttnplugError
from attnplug_kit.oracle import assert_close, attend

SIZE, BLOCKS, HEADS, KV_HEADS, WIDTH = 4, 12, 4, 2, 8
VARIANTS = (
    {},
    {"sliding_window": 3},
    {"logits_soft_cap": 5.0, "return_lse": True},
    {"kv_layout": "HND", "return_lse": True},
    {"dtype": "bfloat16"},
    {"decode_query_len": 2, "attention_chunk": 4},
    {"sliding_window": 2**31 - 1, "attention_chunk": 2**31 - 1, "logits_soft_cap": 2.0**126},
    {"attn_type": "encoder_decoder"},
    {"paged": False, "return_lse": True},
    {"paged": False, "attn_type": "encoder_only"},
)
MODES = {"no_grad": torch.no_grad, "grad": torch.enable_grad, "inference": torch.inference_mode}
INDEXES = ("query_start_loc", "seq_lens", "block_table", "slot_mapping", "key_start_loc", "encoder_seq_lens")
OPTIONAL = ("encoder_seq_lens", "dcp_local_seq_lens", "custom_mask")
COUNTS = ("num_reqs", "num_actual_tokens", "max_query_len", "max_seq_len", "common_prefix_len", "max_encoder_seq_len")


class Side:
    """A backend with its layer and builder, for one kind of call."""

    def __init__(self, requested, writer):
        requirements = attnplug.Requirements(
            **{"head_size": WIDTH, "num_q_heads": HEADS, "num_kv_heads": KV_HEADS, "dtype": "float32", **requested}
            | ({"block_size": SIZE} if requested.get("paged", True) else {})
        )
        self.backend = attnplug.load(requirements, "cpu", backend="torch/sdpa")
        self.requirements = requirements
        self.impl = self.backend.make_impl(Layer(name="layer", cache_write=writer if requirements.paged else None))
        limits = Limits(max_num_reqs=6, max_num_tokens=32, max_seq_len=32, num_blocks=BLOCKS)
        self.builder = self.backend.make_builder([self.impl], self.backend.make_state(limits))
        self.is_cross = requirements.attn_type == "encoder_decoder"
        self.dtype = getattr(torch, requirements.dtype)


class Call:
    """The arguments of one call, by name, before and after they were mutated."""

    def __init__(self, side, rng):
        self.has_written = False
        self.side, self.mode = side, rng.choice(["no_grad", "no_grad", "inference", "grad"])
        decodes = [1] * rng.randint(0, 2)
        queries = decodes + [
            rng.randint(side.requirements.decode_query_len + 1, 4) for _ in range(rng.randint(not decodes, 2))
        ]
        is_new = not side.requirements.causal and not side.is_cross
        lens = [query + (0 if is_new else rng.randint(0, 7)) for query in queries]
        self.fields = self.batch_fields(rng, queries, lens)
        tokens = sum(queries) + rng.choice([0, 0, 2])
        rows = max(tokens, 1) if side.requirements.paged and not side.is_cross else self.key_rows
        torch.manual_seed(rng.randint(0, 9999))
        self.tensors = {
            "query": torch.randn(tokens, HEADS, WIDTH).to(side.dtype),
            "key": torch.randn(rows, KV_HEADS, WIDTH).to(side.dtype),
            "value": torch.randn(rows, KV_HEADS, WIDTH).to(side.dtype),
            "output": torch.full((tokens, HEADS * WIDTH), 7.0, dtype=side.dtype),
        }
        if side.requirements.return_lse:
            self.tensors["lse"] = torch.full((tokens, HEADS), 7.0)
        if side.requirements.paged:
            self.tensors["kv_cache"] = torch.randn(2, BLOCKS, SIZE, KV_HEADS, WIDTH).to(side.dtype)

    def batch_fields(self, rng, queries, lens):
        side, extra = self.side, {}
        if not side.requirements.paged:
            batch = Batch.from_lengths(queries, lens, causal=side.requirements.causal)
            self.key_rows = sum(lens)
            return batch.to_dict()
        keys = lens
        if side.is_cross:
            keys = [rng.randint(1, 8) for _ in lens]
            extra = {"causal": False, "encoder_seq_lens": torch.tensor(keys, dtype=torch.int32)}
        free = iter(rng.sample(range(1, BLOCKS), BLOCKS - 1))
        table = torch.zeros(len(lens), 3, dtype=torch.int32)
        for row, length in enumerate(keys):
            for column in range(-(-length // SIZE)):
                table[row, column] = next(free)
        first = [0] * len(keys) if side.is_cross else [n - q for n, q in zip(lens, queries, strict=True)]
        slots = [
            int(table[row, p // SIZE]) * SIZE + p % SIZE
            for row, (start, end) in enumerate(zip(first, keys, strict=True))
            for p in range(start, end)
        ]
        self.key_rows = len(slots)
        slots = torch.tensor(slots, dtype=torch.int64)
        return Batch.from_lengths(queries, lens, block_table=table, slot_mapping=slots, **extra).to_dict()

    def run(self):
        tensors = dict(self.tensors)
        metadata = self.side.builder.build(Batch(**self.fields))
        pool = tensors.pop("kv_cache", None)
        with MODES[self.mode]():
            backend = self.side.backend
            cache = None if pool is None else backend.bind_cache(split_kv(pool, "joint", "NHD", WIDTH))
            if self.side.impl.host_writes:
                self.side.impl.write_kv(tensors["key"], tensors["value"], cache, self.fields["slot_mapping"])
                self.has_written = True
            self.side.impl.forward(kv_cache=cache, metadata=metadata, **tensors)


# --- what may be changed ------------------------------------------------------------------------------------------


def change_form(rng, call):
    """Another shape, stride, dtype or device of a tensor of the call."""
    name = rng.choice(list(call.tensors))
    tensor = call.tensors[name]
    call.tensors[name] = rng.choice(
        [
            lambda t: t[:-1],
            lambda t: torch.cat([t, t[-1:]]),
            lambda t: t.transpose(0, 1),
            lambda t: t.transpose(-1, -2),
            lambda t: t.unsqueeze(0),
            lambda t: t[:1].expand(t.shape),
            lambda t: torch.cat([t, t], -1)[..., : t.shape[-1]],
            lambda t: torch.stack([t, t], -1)[..., 0],
            lambda t: torch.cat([t, t], 0)[::2],
            lambda t: torch.zeros(t.numel() + 64, dtype=t.dtype).as_strided(
                t.shape, [max(1, s - 1) for s in t.stride()]
            ),
            lambda t: t.transpose(0, 1).contiguous().transpose(0, 1),
            lambda t: t.to(rng.choice([torch.float16, torch.float64, torch.int32, torch.bfloat16])),
            lambda t: t.to("meta"),
            lambda t: t[:0],
        ]
    )(tensor)


def change_flags(rng, call):
    """A gradient, an inference tensor, another mode."""
    name = rng.choice(list(call.tensors))
    kind = rng.choice(["grad", "inference", "mode"])
    if kind == "mode":
        call.mode = rng.choice(list(MODES))
    elif kind == "grad" and call.tensors[name].is_floating_point() and not call.tensors[name].is_inference():
        call.tensors[name] = call.tensors[name].detach().requires_grad_()
    else:
        with torch.inference_mode():
            call.tensors[name] = call.tensors[name].clone()


def change_memory(rng, call):
    """One tensor in the memory of another."""
    one, other = rng.sample(list(call.tensors), 2)
    if (one, other) == ("query", "kv_cache") and call.side.impl.host_writes:
        return  # the host's own write changes the query, before the call that reads it
    wanted, memory = call.tensors[one], call.tensors[other]
    if memory.is_contiguous() and memory.dtype == wanted.dtype and not memory.is_meta:
        flat = memory.detach().view(-1)
        at = rng.choice([0, max(0, flat.numel() - wanted.numel()), rng.randint(0, flat.numel())])
        if flat[at:].numel() >= wanted.numel():
            call.tensors[one] = flat[at : at + wanted.numel()].view(wanted.shape)


def change_index(rng, call):
    """Another number in an index tensor, in the tensor and its copy or in one of them."""
    name = rng.choice([name for name in INDEXES if name in call.fields])
    tensor = call.fields[name].clone()
    if not tensor.numel() or tensor.is_meta:
        return
    place = tuple(rng.randrange(size) for size in tensor.shape)
    choices = [0, -1, 1, -2, 2**31 - 1, int(tensor[place]) + 1, int(tensor[place]) - 1, rng.randint(0, 60)]
    tensor[place] = rng.choice([*choices, int(tensor.flatten()[0]), BLOCKS * SIZE, BLOCKS])
    which = rng.choice(["both", "both", "both", "tensor", "copy"])
    if which != "copy":
        call.fields[name] = tensor
    if which != "tensor":
        call.fields[f"{name}_cpu"] = tensor


def change_index_form(rng, call):
    """Another shape, dtype or device of an index tensor."""
    name = rng.choice([name for name in INDEXES if name in call.fields])
    tensor = call.fields[name]
    changed = rng.choice(
        [
            lambda t: t[:-1],
            lambda t: torch.cat([t, t[-1:]]),
            lambda t: t.to(torch.int64 if t.dtype == torch.int32 else torch.int32),
            lambda t: t.to("meta"),
            lambda t: t.unsqueeze(0),
            lambda t: torch.stack([t, t], -1)[..., 0],
            lambda t: torch.cat([t, t], -1) if t.ndim == 2 else t[::2],
            lambda t: t.float(),
            lambda t: t[:1].expand(t.shape) if len(t) else t,
        ]
    )(tensor)
    call.fields[name] = changed
    if rng.random() < 0.7:
        call.fields[f"{name}_cpu"] = changed


def change_count(rng, call):
    """Return another number, or a value that is not a number."""
    name = rng.choice(COUNTS)
    value = min(int(call.fields.get(name) or 0), 99)
    call.fields[name] = rng.choice([value + 1, value - 1, 0, -1, SIZE, 2**31, 10**400, float(value), True, str(value)])


def change_fields(rng, call):
    """A field too many, or too few."""
    name = rng.choice(
        ["block_table", "slot_mapping", "key_start_loc", "encoder_seq_lens", "dcp_local_seq_lens", "custom_mask"]
    )
    if name in call.fields and rng.random() < 0.5:
        del call.fields[name]
        call.fields.pop(f"{name}_cpu", None)
    else:
        found = rng.choice([call.fields["seq_lens"], call.fields["query_start_loc"], torch.ones(9, dtype=torch.bool)])
        call.fields[name if name == "custom_mask" else rng.choice([name, f"{name}_cpu"])] = found


def change_together(rng, call):
    """Changes that leave a valid batch: tokens without a slot, a request's blocks in other places, spare columns."""
    if "slot_mapping" in call.fields and len(call.fields["slot_mapping"]) and rng.random() < 0.5:
        slots = call.fields["slot_mapping"].clone()
        slots[rng.randrange(len(slots))] = -1
        call.fields |= {"slot_mapping": slots, "slot_mapping_cpu": slots}
    elif "block_table" in call.fields:
        table = torch.nn.functional.pad(call.fields["block_table"], (0, 2), value=rng.choice([0, 99]))
        call.fields |= {"block_table": table, "block_table_cpu": table}


CHANGES = (
    change_form,
    change_flags,
    change_memory,
    change_index,
    change_index_form,
    change_count,
    change_fields,
    change_together,
)

# --- what is right ------------------------------------------------------------------------------------------------


def bytes_of(tensors):
    """Return a copy of the memory of every tensor; tensors on the device meta have no memory."""
    with torch.inference_mode():
        return {
            name: torch.tensor([], dtype=torch.uint8).set_(t.untyped_storage()).clone()
            for name, t in tensors.items()
            if not t.is_meta
        }


def written(call, before):
    """Return the cache after the slots were written."""
    cache = before["kv_cache"].clone()
    for row, slot in enumerate(call.fields["slot_mapping"].tolist()):
        if slot >= 0:
            cache[:, slot // SIZE, slot % SIZE] = torch.stack([before["key"][row], before["value"][row]])
    return cache


def expected(call, before, cache, rows, request, *, of_call):
    """Return the oracle's result for one request."""
    requested = call.side.requirements
    keys, values = keys_of(call, before, cache, request)
    if of_call:
        count = rows.stop - rows.start
        keys, values = keys.clone(), values.clone()
        keys[len(keys) - count :], values[len(values) - count :] = before["key"][rows], before["value"][rows]
    left = -1 if requested.sliding_window is None else requested.sliding_window - 1
    return attend(
        before["query"][rows],
        keys,
        values,
        scale=WIDTH**-0.5,
        causal=requested.causal,
        window=(left, 0 if left >= 0 else -1),
        attention_chunk=requested.attention_chunk,
        logits_soft_cap=requested.logits_soft_cap,
    )


def check_served(call, before):
    """Compare what a call wrote with what its tensors say."""
    side, fields, tensors = call.side, call.fields, call.tensors
    cache = written(call, before) if "kv_cache" in tensors else None
    scale = max(1.0, float(before["value"].abs().max()))
    starts = fields["query_start_loc"].tolist()
    for request in range(fields["num_reqs"]):
        rows = slice(starts[request], starts[request + 1])
        unwritten = cache is not None and not side.is_cross and bool((fields["slot_mapping"][rows] < 0).any())
        found = [expected(call, before, cache, rows, request, of_call=kind) for kind in (False, True)[: 1 + unwritten]]
        # A token without a slot is cached already: a backend may read its K/V there, or from the call.
        for row in range(rows.stop - rows.start):
            check_row(call, rows.start + row, row, found, scale)
    for name in ("output", "lse"):
        if name in tensors:
            assert torch.equal(tensors[name][starts[-1] :], before[name][starts[-1] :])
    if cache is not None:
        assert torch.equal(tensors["kv_cache"][:, 1:], cache[:, 1:])


def check_row(call, row, place, found, scale):
    """Check one row against the results that are right, of which the last one explains a failure."""
    for exact in found:
        wanted = {"output": exact.output[place].flatten(), "lse": exact.lse[place]}
        try:
            for name in wanted.keys() & call.tensors.keys():
                assert_close(call.tensors[name][row], wanted[name], dtype=call.side.dtype, scale=scale, what=name)
        except AssertionError:
            if exact is found[-1]:
                raise
        else:
            return


def keys_of(call, before, cache, request):
    fields = call.fields
    if cache is None:
        rows = slice(*fields["key_start_loc"].tolist()[request : request + 2])
        return before["key"][rows], before["value"][rows]
    count = int(fields["encoder_seq_lens" if call.side.is_cross else "seq_lens"][request])
    blocks = fields["block_table"][request].tolist()
    nothing = torch.full_like(cache[:, 0, 0], 99.0)  # a block that a window has left may be any: nobody reads it
    places = [(blocks[p // SIZE], p % SIZE) for p in range(count)]
    rows = [cache[:, block, offset] if 0 <= block < BLOCKS else nothing for block, offset in places]
    pages = torch.stack(rows, 1) if rows else cache[:, 0, :0]
    return pages[0], pages[1]


def outcome(call):
    """Run a call. It is served right, or refused with nothing written: everything else fails."""
    with torch.inference_mode():
        before = {name: tensor.detach().clone() for name, tensor in call.tensors.items()}
    memory = bytes_of(call.tensors)
    refusal = None
    try:
        call.run()
    except AttnplugError as error:
        refusal = error
    if refusal is not None:
        after = bytes_of(call.tensors)
        # write_kv is a call by itself: where the host has written, a forward that is refused leaves that.
        kept = [name for name in memory if not (call.has_written and in_cache(call.tensors, name))]
        assert all(torch.equal(after[name], memory[name]) for name in kept), refusal
        return f"refused: {type(refusal).__name__}"
    with torch.inference_mode():
        check_served(call, before)
    return "served"


def in_cache(tensors, name):
    return tensors[name].untyped_storage().data_ptr() == tensors["kv_cache"].untyped_storage().data_ptr()


@pytest.fixture(scope="module")
def sides():
    return [Side(requested, writer) for requested in VARIANTS for writer in ("forward", "host")]


@pytest.mark.parametrize("count", [250, pytest.param(10_000, marks=pytest.mark.slow)])
def test_mutated_calls_are_served_right_or_refused(sides, count):
    rng, found = random.Random(count), Counter()
    for number in range(count):
        call = Call(rng.choice(sides), rng)
        changes = rng.choices(CHANGES, k=rng.choice([0, 1, 1, 1, 2, 3]))
        for change in changes:
            with suppress(RuntimeError, IndexError):  # the change needs more axes or elements
                change(rng, call)
        try:
            found[outcome(call)] += 1
        except Exception as error:
            names = ", ".join(change.__name__ for change in changes)
            raise AssertionError(f"call {number} ({names}) on {call.side.requirements}: {error!r}") from error
    print(dict(found))  # noqa: T201 - the report of a long run

    assert found["served"] > count // 8
    assert count - found["served"] > count // 4
