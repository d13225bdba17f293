"""The kit on mutants, backends with one mistake each: the test for the mistake fails, with the right message."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

import attnplug.torch_backend
from attnplug.request.domains import PER_TOKEN_HEAD
from attnplug_kit.fields import ROWS
from tools import forked

pytestmark = pytest.mark.long

HERE = Path(__file__).parent
ROOT = HERE.parents[2]
MANIFEST = Path(attnplug.torch_backend.__file__).with_name("attnplug.toml").read_text("utf-8")
BUILT_IN = MANIFEST.partition("# No custom_mask")[0].replace('name = "torch", aliases = ["TORCH_SDPA"]', 'name = "{}"')
LEAST = (HERE / "minimal" / "attnplug.toml").read_text("utf-8").replace('name = "minimal"', 'name = "{}"')
LEAST = LEAST.replace("features =", f"kv_cache_dtype = {['auto', *PER_TOKEN_HEAD]}\nfeatures =")

MUTANTS: dict[str, tuple[str, str]] = {
    "ignores_sinks": ("test_feature_is_used[*sinks=True]", "sinks=True was requested*without it: ignored"),
    "ignores_window": ("test_feature_is_used[*sliding_window=7]", "sliding_window=7 was requested*without it: ignored"),
    "window_off_by_one": ("test_capability[*sliding_window=7]", "sliding_window=7: output: * elements differ"),
    "wrong_gqa": ("test_plain_attention[*gqa_ratio=2]", "gqa_ratio=2 *: output: * elements differ"),
    "writes_padding": (
        "test_written_slots[*block_size=16]",
        "keys were written into slot *slot -1 are padding",
    ),
    "reads_stale_block": ("test_step_after_step[*]", "step 2 of one builder: output: "),
    "lse_base_2": ("test_base[*]", "the LSE is a logarithm to base 2"),
    "forgets_soft_cap": ("test_feature_is_used[*logits_soft_cap=2.0]", "logits_soft_cap=2.0 was requested*ignored"),
    "wrong_scale": ("test_input_is_used[*-scale]", "another value of scale does not change the output"),
    "mutates_input": ("test_forward_mutates_no_input[*]", "forward changed its input query"),
    "non_causal_chunk": ("test_chunked_equals_one_shot[*sinks=True]", "of a chunked prefill: output: "),
    "ignores_k_scale": (
        "test_input_is_used[*k_scale of fp8_e4m3]",
        "another value of k_scale *ignored",
    ),
    "swaps_decodes_and_prefills": ("test_mixed_batch[*]", "output: * elements differ"),
    "plans_with_last_pages": ("test_build_ahead[*]", "a step that was built before another one: output: "),
    "sink_twice_in_merge": ("test_cascade_equals_flat[*-sinks]", "sinks=True, cascade: output: "),
    "ignores_slopes": ("test_feature_is_used[*alibi=linear]", "alibi=linear was requested*without it: ignored"),
    "ignores_mask": ("test_feature_is_used[*custom_mask=True]", "custom_mask=True was requested*without it: ignored"),
    "hides_later_in_spans": ("test_capability[*mm_prefix=True]", "mm_prefix=True *: output: * elements differ"),
    "ignores_bias": ("test_feature_is_used[*attn_bias=True]", "attn_bias=True was requested*without it: ignored"),
    "ignores_chunk": ("test_feature_is_used[*attention_chunk=16]", "attention_chunk=16 was requested*ignored"),
    "writes_rows_beyond": ("test_output_rows[*]", "output rows beyond the batch's tokens were written"),
    "adds_to_output": ("test_output_rows[*]", "output rows keep what they held before"),
    "build_mutates_batch": ("test_build_mutates_nothing[*]", "build changed block_table"),
    "overwrites_original": ("test_update_block_table[*]", "update_block_table changed the original's block_table"),
    "sink_in_lse_undeclared": (
        "test_sink_is_counted_as_declared[*]",
        "lse_includes_sink is False, and the LSE includes",
    ),
    "ignores_v_scale": (
        "test_input_is_used[*v_scale of fp8_e5m2]",
        "another value of v_scale *ignored",
    ),
    "keeps_no_cache": ("test_written_slots[*kv_layout=HND]", "numbers of new keys are not in their slots"),
    "writes_next_slot": (
        "test_written_slots[*block_size=16]",
        "keys were written into slot *belongs to no token",
    ),
    "lets_freed_blocks_through": (
        "test_freed_blocks[*sliding_window=7]",
        "blocks before its reach are freed: output: ",
    ),
    "mixes_requests": ("test_requests_are_independent[*]", "NaN in the first request's cache reached rows"),
    "lse_of_prefills_alone": ("test_rows[*]", "rows of the LSE are not written"),
    "stale_replay": ("test_replays[*cudagraph=uniform_batch]", "a replay: output: "),
    "leaves_padding": ("test_replays[*", "a replay, output rows of padded requests are not finite"),
    "lse_of_padding": ("test_replays[*", "the LSE of a padded request is -49997.7"),
    "freezes_mask": (
        "test_replays[*custom_mask=True cudagraph=uniform_batch]",
        "custom_mask=True*: a replay: output: ",
    ),
    "prepares_in_build": ("test_replays_without_build[*cudagraph=uniform_batch]", "a replay without a build: output: "),
    "shares_graph_plans": (
        "test_agreements_of_one_state[*sliding_window=7]",
        "sliding_window=7: with a plain agreement in one state: output: ",
    ),
    "keeps_first_workspace": (
        "test_agreements_of_one_state[*head_size=1024]",
        "head_size=1024*: with a plain agreement in one state: an eager step: output: ",
    ),
    "shares_scratch": ("test_threads[*]", "a thread among others: output: "),
    "advances_original": ("test_advance_step[*]", "step 1 of an advanced batch: output: "),
    "uses_plan_up": ("test_forward_twice[*]", "a layer after another one: output: "),
    "plans_by_place": ("test_step_in_reused_tensors[*]", "a step in the tensors of the step before: output: "),
    "wrong_at_odd_sizes": ("test_plain_attention[*head_size=40]", "head_size=40 *: output: * elements differ"),
    "first_layers_scale": ("test_layers_of_one_builder[*-plain]", "layer 2 of a builder for two: output: "),
    "first_layers_sinks": ("test_layers_of_one_builder[*sinks=True]", "sinks=True: layer 2 of a builder for two: "),
    "first_layers_cache": ("test_layers_of_one_builder[*-plain]", "layer 2 of a builder for two: output: "),
    "loses_a_split": ("test_long_sequences[*paged=True]", "output: * elements differ"),
    "loses_requests": ("test_many_requests[*]", "output: * elements differ"),
    "loses_heads": ("test_many_requests[*]", "num_kv_heads=8 *: output: * elements differ"),
    "packed_queries": ("test_rows_of_wider_tensors[*]", "rows of wider tensors: output: "),
    "packed_table": ("test_rows_of_wider_tensors[*]", "ndex*out of"),
    "advances_in_same_pages": ("test_advance_step[*]", "step 2 of an advanced batch: output: "),
    "moves_keys_alone": (
        "test_copied_and_swapped_blocks[*kv_layout=HND]",
        "swap_blocks did not copy the values",
    ),
    "hurries_without_order": ("test_fast_build[*]", "a fast build: output: "),
    "non_causal_decodes": ("test_decodes_of_several_tokens[*=2]", "decode_query_len=2 *: output: * elements differ"),
    "rounds_float32": ("test_plain_attention[*dtype=float32]", "dtype=float32 *: output: * elements differ"),
    "cuts_value_heads": ("test_capability[*head_size_v=24]", "head_size_v=24 *: output: * elements differ"),
    "slopes_without_root": ("test_capability[*alibi=sqrt]", "alibi=sqrt *: output: * elements differ"),
    "causal_encoders": ("test_capability[*attn_type=encoder_only]", "attn_type=encoder_only *: output: * elements"),
    "always_causal": ("test_feature_is_used[*causal=False]", "causal=False was requested*without it: ignored"),
    "forgets_encoders_end": ("test_capability[*attn_type=encoder_decoder]", "attn_type=encoder_decoder *: output: "),
    "clears_shared_slots": ("test_capability[*kv_sharing=True]", "kv_sharing=True *: output: * elements differ"),
    "needs_prefills": ("test_decodes_alone[*]", "output: * elements differ"),
    "needs_decodes": ("test_prefills_alone[*]", "output: * elements differ"),
    "wrong_at_odd_blocks": ("test_plain_attention[*block_size=12]", "block_size=12 *: output: * elements differ"),
    "forgets_dense_context": ("test_plain_attention[*paged=False]", "paged=False*: output: * elements differ"),
    "first_heads_scale": ("test_capability[*per_head_scales=True]", "per_head_scales=True*: output: * elements differ"),
    "loses_shared_prefix": ("test_cascade_equals_flat[*-plain]", "cascade=True *cascade: output: * elements differ"),
    "keeps_wide_cache": (
        "test_cache_is_as_agreed[*=fp8_e5m2]",
        "torch.float32, and the agreement has torch.float8_e5m2",
    ),
    "tokens_first_in_memory": ("test_cache_is_as_agreed[*=HND]", "MutantBackend.cache_tensors returned"),
    "ignores_block_stride": ("test_plain_attention[*kv_cache_form=joint]", "joint *: output: * elements differ"),
    "values_behind_keys": ("test_plain_attention[*kv_cache_form=interleaved]", "out of bounds"),
    "one_set_of_strides": ("test_plain_attention[*kv_cache_form=independent]", "independent *: output: * elements"),
    "keys_strides_for_values": ("test_capability[*head_size_v=128]", "head_size_v=128 *: output: * elements differ"),
    "dense_tokens_in_packed": ("test_plain_attention[*kv_cache_form=packed]", "packed *: output: * elements differ"),
    "splits_by_limit": ("test_split_kv_limit[*]", "limits with max_num_splits=1: output: * elements differ"),
    "first_block_size": ("test_late_block_size[*block_size=12]", "bound to block_size=12"),
    "keeps_first_scales": ("test_late_scales[*=fp8_e4m3]", "scales that came after make_impl: output: "),
    "keys_rows_for_values": ("test_plain_attention[*]", ""),
    "tokens_first_in_queries": ("test_plain_attention[*]", "output: * elements differ"),
    "scales_bfloat16_queries": ("test_forward_mutates_no_input[*-dtype=bfloat16]", "forward changed its input query"),
    "forgets_context_of_short": ("test_decodes_of_several_tokens[*=5]", "output: * elements differ"),
    "wrong_at_three": ("test_decodes_of_several_tokens[*=5]", "output: * elements differ"),
    "goes_on_with_all": ("test_advance_with_fewer_requests[*-plain]", "2 of 3 requests go on: "),
    "forgets_prefills_that_end": ("test_advance_after_prefills[*]", ""),
    "splits_once_for_long_steps": ("test_long_steps_of_one_state[*]", "long step 2 of one state: output: "),
    "one_shape_of_builder": ("test_replays_of_shapes[*=uniform_batch]", ""),
    "shares_plans_of_agreement": ("test_agreements_of_one_state[*-the same agreement]", ""),
    "ends_prefixes_at_512": ("test_cascade_equals_flat[*-a prefix of more than 512 keys]", "cascade: output: "),
    "moves_first_pair": ("test_copied_and_swapped_blocks[*]", "swap_blocks did not copy"),
    "keeps_first_value_scale": ("test_late_scales[*=fp8_e4m3]", "output: * elements differ"),
    "leaves_decodes_to_nobody": ("test_slots_written_by_the_host[*]", "of new keys are not in their slots"),
    "overflows_at_the_cap": ("test_scores_beyond_the_soft_cap[*=30.0]", "output: * elements differ"),
    "ends_slopes_early": ("test_dominant_far_key[*alibi=linear]", "a far key has most of the weight: output: "),
    "reads_256_requests": ("test_many_requests[*-plain]", "output: * elements differ"),
    "ends_at_32767_keys": ("test_32768_keys[*]", "decodes of 32768 keys: output: "),
    "guesses_layout": ("test_written_slots[*heads outnumber slots of HND]", "output: * elements differ"),
    "cuts_value_heads_of_hnd": ("test_capability[*head_size_v=24 kv_layout=HND]", "output: * elements differ"),
    "knows_metadata_by_id": ("test_metadata_in_the_place_of_another[*]", "in the place of that of another step"),
    "keeps_first_slopes": ("test_changed_in_place[*alibi=linear]", "alibi_slopes in place: output: "),
    "keeps_first_sinks": ("test_sinks_with_call[*sinks=True]", "sinks of call 2: output: "),
    "counts_short_queries": ("test_any_order[*-decodes last]", "output: * elements differ"),
    "reads_padded_rows": ("test_padding[*-padded requests]", "with padding: output: * elements differ"),
    "takes_longest_query": ("test_any_order[*-decodes between prefills]", "output: * elements differ"),
    "writes_zero_rows": ("test_calls_without_kv[*]", "a call without K/V has written the KV cache"),
    "writes_rope_first": ("test_written_slots[*latent=True]", "numbers of new keys are not in their slots"),
    "values_without_latents_end": ("test_plain_attention[*latent=True]", "latent=True *: output: * elements differ"),
    "scales_by_key_size": ("test_plain_attention[*latent=True]", "latent=True *: output: * elements differ"),
    "one_scale_per_record": ("test_capability[*=fp8_ds_mla]", "fp8_ds_mla *: output: * elements differ"),
    "lse_of_latents_base_2": ("test_base[*-latent]", "the LSE is a logarithm to base 2"),
    "lse_of_latents_by_head": ("test_base[*-latent]", "lse: * elements differ"),
    "plans_latents_once": ("test_advance_step[*latent=True]", "of an advanced batch: output: "),
    "sorts_pages_of_latents": ("test_chunked_equals_one_shot[*latent=True]", "output: * elements differ"),
    "reads_no_token_as_last_slot": ("test_plain_attention[*topk=5]", "topk=5: output: "),
    "reads_no_token_as_first_slot": ("test_plain_attention[*topk=5]", "topk=5: output: "),
    "clamps_indices_in_place": ("test_forward_mutates_no_input[*topk=5]", "forward changed its input indices"),
    "ignores_index_lens": ("test_capability[*topk=64]", "topk=64*: output: "),
    "selects_causally": ("test_plain_attention[*topk=5]", "topk=5: output: "),
    "ends_rows_at_their_position": ("test_plain_attention[*topk=64]", "topk=64: output: "),
    "selects_positions": ("test_plain_attention[*topk=5]", "topk=5: output: "),
    "strides_of_padded_heads": ("test_plain_attention[*topk=64]", "topk=64: output: "),
    "freezes_indices": ("test_replays[*topk=5 cudagraph=uniform_batch]", "a replay: output: "),
    "profiles_with_metadata": ("test_profiling_run[*]", "a profiling run, without metadata and cache, raised "),
}
# Of what the built-in backend does not declare: these are wrong in what the least backend does.
MUTANTS_OF_LEAST: dict[str, tuple[str, str]] = {
    "sums_by_place": (
        "test_batch_invariant[*-plain]",
        "request 1 (1 new tokens, 1100 before) has other bits in a small batch",
    ),
    "splits_by_batch_size": (
        "test_batch_invariant[*-plain]",
        "request 1 (1 new tokens, 1100 before) has other bits before many",
    ),
    "trusts_seq_lens_cpu": (
        "test_seq_lens_cpu_kind[*=upper_bound]",
        "seq_lens_cpu_kind=upper_bound*: output: * elements differ",
    ),
    "averages_queries": ("test_query_lens_cpu_kind[*-paged]", "query_lens_cpu_kind=absent*: output: "),
    "takes_longest_length": ("test_seq_lens_cpu_kind[*=absent]", "is out of bounds"),
    "value_scales_of_keys": ("test_capability[*=int8_per_token_head]", "output: * elements differ"),
    "scales_of_next_head": ("test_capability[*=fp8_per_token_head]", "output: * elements differ"),
    "scales_heads_together": (
        "test_written_slots[*=int8_per_token_head]",
        "numbers of new keys are not in their slots",
    ),
}
MUTANTS_ON_GPU: dict[str, tuple[str, str]] = {
    "waits_for_device": ("test_build_never_synchronizes[*]", "build or forward waits for the device"),
}

RUN = """
import json, sys
from pathlib import Path
import pytest, torch
import attnplug
torch.set_num_threads(1)
folder, mutants = Path(sys.argv[1]), json.loads(sys.argv[2])
for name, test in mutants.items():
    attnplug.register("kit.tests.conformance.defects.plugin", manifest=folder / f"{name}.toml")
    options = [f"--attn-backend={name}", *sys.argv[3:], f"--attn-report={folder / name}", "-k", test]
    plain = ["-p", "no:randomly", "-p", "no:cacheprovider", "-q", "--rootdir", str(folder)]
    pytest.main(["--pyargs", "attnplug_kit", *plain, *options])
"""


@pytest.fixture(scope="module")
def reports(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[dict[str, str]]]:
    return run(tmp_path_factory.mktemp("mutants"), MUTANTS, "--attn-device=cpu")


@pytest.fixture(scope="module")
def reports_of_least(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[dict[str, str]]]:
    return run(tmp_path_factory.mktemp("wrong"), MUTANTS_OF_LEAST, "--attn-device=cpu", manifest=LEAST)


def run(
    folder: Path,
    mutants: dict[str, tuple[str, str]],
    *options: str,
    manifest: str = BUILT_IN,
) -> dict[str, list[dict[str, str]]]:
    """Run every mutant in one process, each under the test that has to fail."""
    for name in mutants:
        (folder / f"{name}.toml").write_text(manifest.replace("{}", name, 1), "utf-8")
    tests = json.dumps({name: test.partition("[")[0] for name, (test, _) in mutants.items()})
    path = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
    # Tracing would double the time, and what the kit runs is measured where it runs the built-in backend.
    outside = {name: value for name, value in os.environ.items() if not name.startswith("COVERAGE_")}
    environment = {**outside, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
    done = forked.run("-c", RUN, str(folder), tests, *options, env=environment, cwd=folder)
    assert done.returncode == 0, done.stderr
    return {name: json.loads((folder / name / "report.json").read_text("utf-8"))[0]["tests"] for name in mutants}


@pytest.mark.slow
@pytest.mark.parametrize("mutant", MUTANTS)
def test_a_mutant_is_found(mutant: str, reports: dict[str, list[dict[str, str]]]) -> None:
    require_failure(MUTANTS[mutant], reports[mutant])


@pytest.mark.slow
@pytest.mark.parametrize("mutant", MUTANTS_OF_LEAST)
def test_a_mutant_of_the_least_backend_is_found(mutant: str, reports_of_least) -> None:
    require_failure(MUTANTS_OF_LEAST[mutant], reports_of_least[mutant])


@pytest.mark.gpu
@pytest.mark.parametrize("mutant", MUTANTS_ON_GPU)
def test_a_mutant_is_found_on_a_gpu(mutant: str, tmp_path: Path) -> None:
    require_failure(MUTANTS_ON_GPU[mutant], run(tmp_path, {mutant: MUTANTS_ON_GPU[mutant]})[mutant])


def test_every_field_has_a_mutant() -> None:
    mutants = {path.stem for path in HERE.glob("*/*.py")}

    assert [name for name, row in ROWS.items() if bool(row.unreachable) == (row.wrong in mutants)] == []


def require_failure(wanted: tuple[str, str], tests: list[dict[str, str]]) -> None:
    """Require that the named test fails with the message."""
    test, message = wanted
    failed = {one["id"].rpartition("::")[2]: one["message"] for one in tests if one["outcome"] == "failed"}

    found = [text for name, text in failed.items() if matches(test, name)]

    assert found, f"{test} passed; failed: {failed}"
    assert any(matches(f"*{message}*", text) for text in found), found


def matches(pattern: str, text: str) -> bool:
    """Whether the parts between the stars occur in a text, in order; brackets are literal."""
    first, *parts = pattern.split("*")
    if not text.startswith(first):
        return False
    place = len(first)
    for part in parts:
        place = text.find(part, place)
        if place < 0:
            return False
        place += len(part)
    return not parts or place == len(text) or parts[-1] == ""


def test_there_is_a_test_for_each_mutant() -> None:
    assert {path.stem for path in HERE.glob("mutants/*.py")} == set(MUTANTS) | set(MUTANTS_ON_GPU)
    assert {path.stem for path in HERE.glob("wrong/*.py")} == set(MUTANTS_OF_LEAST)
