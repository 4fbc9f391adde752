"""What runs when: order, marks and plugins of the whole suite."""

from __future__ import annotations

import gc
import os
from bisect import bisect_left
from pathlib import Path

import pytest

from tests import fixtures
from tests.cpu_time import CpuTime
from tests.resuming import resuming
from tests.workers import Workers

LONG = (
    "tests/slurm/",  # it waits for most of its time
    "tests/matrix/",
    "tests/harness/command_line/test_cli.py",
    "tests/gallery/test_verdicts.py",
    "tests/harness/ranks/",
    "tests/parity/test_matrix.py",
    "tests/harness/trial/test_plan_budget.py",
    "tests/harness/check/test_neutrality.py",
    "tests/harness/trial/test_run.py",
    "tests/strategies/ac/test_laws.py",
    "tests/strategies/chunk/",
    "tests/harness/report/wandb/",
    "tests/harness/trial/",
    "tests/parity/",
    "tests/strategies/ac/test_budget.py",
    "tests/harness/command_line/",
    "tests/harness/fit/",
    "tests/docs/test_several_losses.py",
    "tests/acbench/",
    "tests/bench/",
    "tests/strategies/shard/operators/test_operators.py",
    "tests/strategies/shard/model/test_odd_models.py",
    "tests/harness/report/formats/test_page.py",
    "tests/gallery/test_users.py",
    "tests/architecture/",
    "tests/strategies/ac/",
    "tests/harness/measure/memory/",
)
"""Files that take ten seconds or more: first, so that no worker is alone with one of them at the end."""


EXPENSIVE = {
    "tests/parity/": "test_matrix.py::test_is_bitwise_neutral[full-gpt-single",
    "tests/slurm/": "test_client.py::test_a_job_waits_runs_and_ends",
    "tests/gpu/": "",
    "tests/hydra_plugins/": "test_points_are_what_hydra_composes[a number for a string]",
    "tests/harness/command_line/test_cli.py": "",
    "tests/harness/command_line/test_schema.py": "::test_every_option_of_every_group_is_an_experiment[ac=",
    "tests/harness/trial/test_run.py": "",
    "tests/harness/trial/test_assemble.py::test_an_unusual_model": "[odd_outputs ac=full]",
    "tests/harness/trial/test_assemble.py::test_ranks_train": "",
    "tests/harness/trial/test_assemble.py::test_a_plan_that_includes_the_loss": "",
    "tests/harness/trial/test_assemble.py::test_models_that_are_alike_share": "",
    "tests/harness/trial/test_preflight.py": "::test_refuses_blocks_that_are_not_there",
    "tests/harness/sweep/test_launch.py": "::test_a_refused_point_is_a_record",
    "tests/harness/ranks/test_agent.py": "::test_results_come_back_by_rank[1]",
    "tests/harness/ranks/test_agent_nodes.py": "",
    "tests/harness/ranks/test_assistant.py": "",
    "tests/harness/report/wandb/": "",
    "tests/harness/report/formats/test_page.py": "",
    "tests/strategies/ac/test_sharded.py": "",
    "tests/strategies/chunk/": "::test_identical_blocks_have_identical_regions",
    "tests/strategies/shard/operators/test_operators.py": "",
    "tests/strategies/shard/model/test_odd_models.py": "[own norm]",
    "tests/strategies/shard/candidates/test_execution.py": "",
    "tests/strategies/shard/test_cheapest.py": "::test_stays_within_its_memory[0.27]",
    "tests/strategies/nested/test_trees.py": "::test_the_calls_of_the_seed",
    "tests/strategies/ac/test_laws.py": "full]",
    "tests/strategies/ac/test_nested.py::test_parity": "[gpt-the default]",
    "tests/strategies/nested/test_parity.py::test_parity": "[one row, and half precision]",
    "tests/harness/trial/test_proof.py": "[sharding, and two steps of SGD]",
    "tests/harness/trial/test_plan_sharding.py": "[bf16]",
    "tests/harness/trial/test_shared_results.py": "",
    "tests/harness/records/test_statistics.py::test_the_interval_covers": "",
    "tests/strategies/ac/test_full.py::test_checkpointing_of_transformers_is_refused": "",
    "tests/strategies/nested/test_nested_regions.py::test_a_tree_comes_back_from_its_paths": "",
    "tests/gallery/test_verdicts.py": "[n11",
    "tests/gallery/test_entries.py": "[n11",
    "tests/gallery/test_users.py": "[StepInSlots",
    "tests/harness/predict/test_fake_rank.py": "test_what_cannot_be_predicted",
    "tests/harness/check/test_on_ranks.py": "::test_all_ranks_say_the_same[DDP]",
    "tests/strategies/budget/eager/test_idioms.py": "[at a first call-a hook on a tensor]",
    "tests/strategies/budget/compiled/test_compiled_planning.py": "[a write]",
    "tests/strategies/budget/eager/test_carried_out.py": "[without dropout]",
    "tests/strategies/budget/eager/test_random_networks.py": "[2]",
    "tests/harness/trial/test_compilation.py": "",
    "tests/harness/check/test_neutrality.py": "test_names_the_recomputed_value",
    "tests/harness/test_deferred.py": "::test_help_needs_no_torch",
    "tests/architecture/test_pages.py::test_the_variant_and_the_model": "",
    "tests/harness/measure/memory/test_totals.py": "[none]",
    "tests/harness/measure/work/test_counter.py::test_torchs_registry_is_left_alone": "",
    "tests/harness/measure/speed/test_timing.py::test_the_heap": "",
    "tests/harness/models/test_families.py::test_finding_the_families_imports_no_transformers": "",
    "tests/harness/report/formats/test_round_trip.py": "",
    "tests/harness/report/test_odd_records.py::test_a_report_shows": "[nested deeply]",
    "tests/test_rank_pool.py": "",
    "tests/test_forked_servers.py": "",
    "tests/harness/measure/memory/test_allocator.py": "::test_without_compiler_there_is_no_library",
    "tests/harness/experiment/test_experiment.py::test_the_tolerance": "[sharding]",
    "tests/strategies/ac/test_budget.py": "::test_refusal_says_what_would_be_right",
    "tests/harness/trial/test_plan_budget.py": "::test_a_budget_below_what_the_optimizer_needs",
    "tests/strategies/budget/planning/test_planner.py": "[called twice]",
    "tests/strategies/budget/planning/test_chunked_planning.py": "",
    "tests/strategies/budget/planning/test_block_choice.py::test_many_equal_blocks": "-8]",
    "tests/harness/sweep/test_checks.py::test_nothing_that_a_factory": "",
    "tests/harness/sweep/test_checks.py::test_what_another_process": "",
    "tests/bench/": "test_table.py",
    "tests/matrix/": "[none keeps two products]",
    "tests/harness/fit/test_answer.py": "::test_what_is_refused_says_the_remedy",
    "tests/harness/predict/test_batch_sizes.py": "[a number beside the line]",
    "tests/harness/predict/test_repeated_blocks.py": "::test_other_steps_are_traced_in_full",
    "tests/harness/predict/test_compiled_step.py": "",
    "tests/harness/predict/test_fake_pipelines.py": "",
    "tests/harness/predict/test_views.py": "",
    "tests/harness/predict/test_prediction.py::test_tokens": "[ddp2]",
    "tests/harness/measure/gloo/test_wait.py::test_bytes": "",
    "tests/harness/trial/test_distance.py::test_no_variant": "",
    "tests/harness/trial/test_microbatches.py": "",
    "tests/harness/trial/test_assemble.py::test_what_loops_run_again": "",
    "tests/harness/trial/test_asking.py": "",
    "tests/harness/trial/test_kept_plans.py::test_a": "[another budget]",
    "tests/strategies/budget/planning/test_known_plans.py::test_a": "[64]",
    "tests/harness/trial/test_twin_step.py": "::test_what_each_trial_measures_alike",
    "tests/strategies/budget/planning/test_rerun.py": "::test_a_block_runs_again_as_a_whole",
    "tests/strategies/budget/planning/test_lower_bound.py::test_moments": "-1]",
    "tests/harness/launchers/test_run_task.py::test_what_was_never_compared": "",
    "tests/harness/command_line/test_judged.py": "::test_what_needs_no_plan",
    "tests/harness/check/test_remedies.py": "[an operator that is saved]",
    "tests/harness/experiment/test_experiment.py::test_what_follows_a_remedy": "[a backward in two parts]",
    "tests/harness/experiment/test_experiment.py::test_the_dense_experiment": "[AC of each stage]",
    "tests/harness/models/test_hf.py::test_the_shipped_sizes": "[MixtralConfig",
    "tests/gallery/test_meshes.py": "",
    "tests/gallery/test_pipelines.py": "",
    "tests/docs/test_words.py::test_docstrings": "",
    "tests/architecture/test_mirror.py::test_the_tests_named": "",
    "tests/acbench/test_comparing.py::test_a_checkpoint_that_frees_nothing": "",
    "tests/strategies/nested/test_units.py": "",
    "tests/strategies/ac/test_offload.py::test_a_compiler_may_record": "",
    "tests/strategies/shard/model/test_transformers.py::test_grouped_heads": "[eager]",
    "tests/strategies/budget/compiled/test_compiled_ranks.py": "",
    "tests/strategies/budget/compiled/test_joint_split.py::test_every_kept_set": "",
    "tests/strategies/budget/planning/test_autograd_bound.py::test_no_schedule_of_a_captured": "[a funnel]",
    "tests/strategies/budget/planning/test_autograd_bound.py::test_no_schedule_of_a_written": "[4-]",
    "tests/strategies/budget/eager/test_ordered_tape.py": "[the same]",
    "tests/strategies/budget/eager/test_beside.py::test_what_keeps_nothing": "[a head called twice]",
    "tests/strategies/budget/eager/test_group_tape.py::test_results": "[group-",
    "tests/strategies/budget/planning/test_autograd_bound.py::test_moments_together": "",
    "tests/strategies/budget/eager/test_group_tape.py::test_a_plan_has_no_groups": "",
    "tests/harness/measure/parity/test_compare_ranks.py": "",
    "tests/harness/measure/probes/test_tried.py": "",
    "tests/harness/measure/work/test_counter.py::test_collectives": "",
    "tests/harness/measure/work/test_counter.py::test_flops_under_tensor": "",
    "tests/harness/trial/test_pipeline.py": "::test_calls_in_flight",
    "tests/strategies/budget/eager/test_group_tape.py::test_parameters_that": "",
    "tests/strategies/budget/eager/test_group_tape.py::test_steps_are_neutral_on_two_ranks": "",
    "tests/strategies/budget/planning/test_simulation.py::test_predicted_bytes": "[0.0-0.0-0.0]",
    "tests/strategies/shard/candidates/test_redistribution.py": "",
    "tests/strategies/shard/candidates/test_verification.py": "",
    "tests/strategies/shard/model/test_odd_models.py::test_every_plan": "",
    "tests/strategies/shard/model/test_plan_file.py": "",
    "tests/strategies/shard/model/test_realisation.py": "",
    "tests/strategies/shard/operators/test_linear.py::test_a_matrix_product": "",
    "tests/strategies/shard/operators/test_norms.py::test_every_rank": "",
    "tests/strategies/shard/operators/test_weighted_products.py::test_bmm": "",
    "tests/strategies/test_properties_of_peers.py::test_a_step_shows": ", full]",
    "tests/strategies/regions/test_rewind.py::test_every_state": "[set]",
    "tests/strategies/written/test_file_text.py::test_a_step": "rules that keep some-bf16 autocast-biased]",
    "tests/strategies/budget/planning/test_scheduled_planner.py": "",
    "tests/strategies/budget/planning/test_group_options.py": "",
    "tests/strategies/budget/planning/test_enumeration.py::test_no_other": "[residual blocks]",
    "tests/strategies/budget/planning/test_enumeration.py::test_no_plan": "[an LSTM]",
    "tests/strategies/budget/planning/test_group_simulation.py": "[two groups, most kept]",
    "tests/strategies/budget/planning/test_chains.py::test_no_decision": "[handing_on_what_is_saved]",
    "tests/strategies/budget/planning/test_lower_bound.py::test_no_schedule_beats": "[4]",
    "tests/strategies/budget/planning/test_lower_bound.py::test_no_schedule_of": "[19]",
    "tests/strategies/budget/planning/test_rerun.py::test_a_block_runs": "[called twice]",
    "tests/strategies/budget/planning/test_simulation.py::test_every_fate": "",
    "tests/strategies/budget/eager/test_chained_tape.py::test_bytes": "[[(0, 3), (3, 5)]-0.0]",
    "tests/strategies/budget/eager/test_planned_block.py::test_gradients_are_bitwise": "-nothing kept]",
    "tests/strategies/budget/eager/test_named_fates.py::test_gradients": "-every second operator]",
    "tests/strategies/budget/eager/test_beside.py::test_what_runs": "[a head that is the embedding]",
    "tests/strategies/budget/eager/test_beside.py::test_other_orders": "[two in turns]",
    "tests/strategies/budget/compiled/test_joint_graph.py::test_the_digest": "",
    "tests/strategies/chunk/planning/test_chunk_plan.py::test_identical": "",
    "tests/strategies/nested/test_inner_gradients.py::test_gradients_of_three": "[regions in a region-",
    "tests/strategies/regions/test_rewind.py::test_each_of_them": "[BatchNorm]",
    "tests/strategies/regions/test_split_backward.py::test_parts": "-full]",
    "tests/strategies/regions/test_split_backward.py::test_exact": "[one backward",
    "tests/strategies/shard/test_candidate.py::test_data_parallel": "[S0S1",
    "tests/strategies/step/test_plan_capture.py::test_the_plain": "[True-with dropout]",
    "tests/strategies/step/test_late_value.py::test_a_block": "[units by powers]",
    "tests/strategies/foreign/test_policy_files.py::test_refusals": "[no such module]",
    "tests/strategies/test_base.py::test_a_strategy": "[it offers no plans]",
    "tests/strategies/ac/test_megatron.py::test_a_label": "[llama-labels0",
    "tests/harness/predict/test_solve.py::test_the_value": "[length by a square]",
    "tests/harness/predict/test_calibration.py::test_what": "",
    "tests/harness/predict/test_prediction.py::test_it_is_a_record": "",
    "tests/harness/fit/test_largest_batch.py::test_the_largest": "[none]",
    "tests/harness/fit/test_answer.py::test_what_is_refused": "[the model raises]",
    "tests/harness/records/test_bound.py::test_the_rank": "",
    "tests/harness/measure/test_in_place_operators.py::test_the_instrumented": "[reentrant]",
    "tests/harness/measure/test_step_trace.py::test_the_peak": "[full]",
    "tests/harness/measure/test_step_trace.py::test_fake": "",
    "tests/harness/measure/work/test_counter.py::test_flops_and_calls": "[full without early stop]",
    "tests/harness/trial/test_stages.py::test_stages_one": "[interleaved-gpt]",
    "tests/harness/trial/test_distance.py::test_what_has": "[micro-batches]",
    "tests/harness/check/test_fixtures.py::test_the_fixture": "",
    "tests/harness/models/test_families.py::test_dropout": "[gpt_nano]",
    "tests/harness/models/test_families.py::test_flops": "[llama_nano",
    "tests/harness/models/test_families.py::test_number": "[llama_nano",
    "tests/harness/models/test_families.py::test_builds": "[hf]",
    "tests/harness/models/test_families.py::test_the_seed": "[vit_nano]",
    "tests/harness/models/test_families.py::test_outputs": "[vit_nano",
    "tests/harness/report/content/figures/test_encodings.py::test_a_colour": "",
    "tests/harness/report/test_main.py::test_reports_need": "",
    "tests/harness/report/formats/test_hostile.py::test_half": "",
    "tests/harness/report/trackers/test_tracked_run.py::test_a_record": "[mlflow",
    "tests/harness/experiment/test_experiment.py::test_refuses_parts": "[a compiler]",
    "tests/acbench/test_comparing.py::test_a_plan": "",
    "tests/acbench/test_notebook.py": "",
    "tests/architecture/test_layers.py::test_a_new_file": "[a variant imports another]",
    "tests/architecture/test_door.py::test_no_other": "[acbench]",
    "tests/architecture/test_layout.py::test_what_a_field": "[acbench]",
    "tests/strategies/budget/export/test_words_of_others.py": "",
    "tests/architecture/test_layers.py::test_imports_stand": "",
}
"""What `make quick` leaves out, by the start of its name, but for tests whose names hold the value.

An empty value keeps none: no test of its kind is cheap."""

REPEATED: dict[str, tuple[str, ...]] = {
    "tests/matrix/": (
        *("test_toy.py", "test_what_differs", "test_formulas", "test_sets_share"),
        *("test_every_case", "test_a_wrong_end"),
        *("test_legality.py::test_a", "test_equal_experiments", "test_every_rule", "test_what_is_unexpected"),
        *("test_a_slice_is_right", "test_a_guard_that_is_switched_off_is_missed[aliasing"),
        *("test_what_a_recording_does_not_see_is_found_where_nothing_is_proven[checkpoints",),
    ),
    "tests/parity/test_chunks.py::test_chunks_are_neutral": (
        "mlp-budget-single-full-0.1-bf16",  # was wrong once
        "mlp-minimum-shard2-offload",
    ),
    "tests/parity/test_matrix.py::test_is_bitwise_neutral[": (
        *("-single-", "-ddp2-", "-shard2-", "-tp2-", "full-", "budget-", "nested-gpt"),
    ),
    "tests/parity/test_matrix.py::test_every_option_is_bitwise_neutral[a budget with values": (),
    "tests/parity/test_context.py::test_collectives_and_bytes": ("[ring",),
    "tests/parity/test_parts.py::test_collectives_of_parts": (),
    "tests/parity/test_sharding.py::test_is_neutral_within_a_wider": ("bf16-cheapest", "bf16_mixed-megatron"),
    "tests/harness/trial/test_microbatches.py::test_ranks_reduce_gradients": (
        *("[ddp2", "[shard2", "[tp2", "[fsdp1 offload"),
    ),
    "tests/harness/trial/test_distance.py::test_no_variant_is_below_its_bound": ("[gpt",),
    "tests/parity/test_matrix.py::test_is_bitwise_neutral[budget": ("gpt-tp2", "-mlp-"),
    "tests/parity/test_matrix.py::test_is_bitwise_neutral[budget-mlp-shard2_tp2": (),
    "tests/parity/test_matrix.py::test_labels_of_megatron": ("[moe",),
    "tests/parity/test_experts_of_stages.py::test_other_axes": (),
    "tests/parity/test_pipelines.py::test_stages_pass_on_parts": (),
    "tests/parity/test_context.py::test_images_and_models_of_transformers": ("vit",),
    "tests/parity/test_parts.py::test_parts_are_neutral": ("[sequence", "[both]"),
    "tests/parity/test_matrix.py::test_a_written_file": ("[gpt-", "[llama-"),
    "tests/parity/test_matrix.py::test_is_bitwise_neutral[selective_op-": (
        "-gpt-",
        "-mlp-",
        "-moe-",
        "-vit-",
    ),
    "tests/parity/test_matrix.py::test_is_bitwise_neutral[nested-": ("-gpt-", "-mlp-", "-evoformer-"),
    "tests/harness/ranks/test_agent.py::test_nothing_outlives_the_driver": ("SIGKILL", "SIGTERM"),
    "tests/harness/ranks/test_agent_nodes.py::test_the_end_of_an_agent": (),
    "tests/harness/trial/test_pipeline.py::test_bytes_and_forwards_of_ranks": ("[selective_op-zero",),
    "tests/harness/trial/test_proof.py::test_a_chain_reaches": (
        *("kernel", "AC", "compiled", "itself", "and two steps of SGD"),
    ),
    "tests/harness/check/test_neutrality.py::test_names_what_is_not_neutral": (
        *("a schedule that the class keeps", "a table that the class", "nothing checkpointed", "encloses"),
        *("a model that does not repeat itself", "NaN on both sides", "an error that checkpointing hides"),
        "a generator among globals",
    ),
    "tests/strategies/chunk/flow/test_chunk_rules.py::test_chunks_give_what_the_whole_gives": (
        *("[2-", "[1-rows of a batch", "[1-one of a batch", "[1-heads", "[1-nll", "[1-split"),
        *("[5-rows", "[5-every", "[5-batch norm", "[5-convolution", "[5-cat", "[5-slice"),
    ),
    "tests/strategies/chunk/loops/test_buffer_reuse.py::test_gradients_are_those": (
        *("True-_detached_first", "False-_detached_last", "True-_frozen_last"),
    ),
    "tests/strategies/chunk/loops/test_buffer_reuse.py::test_a_result_that_is_broadcast": ("first0",),
    "tests/strategies/chunk/planning/test_chunk_plan.py::test_the_smallest_plan": (
        *("fused attention", "language model", "pictures", "triangle", "a mask of places"),
    ),
    "tests/strategies/chunk/running/test_proof.py::test_what_is_planned_without_values": (
        "its own",
        "a node",
    ),
    "tests/strategies/chunk/running/test_proof.py::test_without_a_proof_it_is_silent": ("a default",),
    "tests/strategies/chunk/running/test_proof.py::test_what_is_no_number": ("NaN", "complex", "dtype"),
    "tests/strategies/chunk/running/test_chunked_forward.py::test_a_block_called_without": ("[0.5",),
    "tests/harness/trial/test_plan_budget.py::test_a_budget_that_only_chunks_keep": ("0.35", "0.305"),
    "tests/harness/trial/test_plan_budget.py::test_ranks_share_a_plan_with_chunks": (),
    "tests/harness/trial/test_plan_sharding.py::test_bytes_are_of_the_dtype": ("bf16", "autocast"),
    "tests/harness/fit/test_answer.py::test_a_step_that_fits_needs_nothing": (),
    "tests/strategies/chunk/planning/test_chunk_plan.py::test_other_shapes_run": ("one token", "sequence"),
    "tests/parity/test_sharding.py::test_is_neutral_within_tolerance[": (
        *("[megatron", "mixes features and batch"),
    ),
    "tests/harness/check/test_neutrality.py::test_a_plan_of_the_first_call": ("a batch and",),
    "tests/harness/measure/gloo/test_wait.py::test_bytes_do_not": ("[fsdp2", "[tp"),
    "tests/harness/trial/test_proof.py::test_what_is_equal_within_rounding": ("[none",),
    "tests/slurm/test_sweeps.py::test_a_killed_driver": (),
    "tests/bench/test_gpu.py::test_every_file_has_tests_of_the_gpu": (),
    "tests/harness/report/wandb/test_publisher.py::test_a_killed_service": (),  # a full disk is default
    "tests/slurm/test_sweeps.py::test_two_shapes": (),
    "tests/bench/test_widths.py": (),
    "tests/harness/trial/test_microbatches.py::test_four_ranks": (),
    "tests/bench/test_step_times.py": (),
    "tests/matrix/test_nested_models.py::test_an_architecture_is_equal": (),
    "tests/parity/test_sharding.py::test_is_neutral_within_tolerance": ("gpt-tp2",),
    "tests/parity/test_sharding.py::test_checkpointing_is_bitwise_neutral_in_every_order": ("outside_fsdp",),
    "tests/strategies/budget/eager/test_idioms.py::test_an_idiom_between_linears": (
        "a recurrent layer",
        "multi-head attention]",
        "a scan into a tensor",
        "batch norm, units in place",
        "two views, one written",
        "attention of one projection",
        "splits",
        "a hook",
        "autocast",
        "a softmax by hand, in place",
        "a module twice",
        "a gradient inside",
        "expanded",
        "complex positions in place",
        "foreach, in place",
        "noise",
        "a reentrant checkpoint",
        "a gated product",
        "a function of one's own before a product",
        "results before a product",
        "a product in place",
    ),
    "tests/strategies/budget/eager/test_idioms.py::test_in_place_on_what_a_linear_made": (
        "three dimensions",
    ),
    "tests/strategies/budget/eager/test_idioms.py::test_an_idiom_around_blocks": (
        "a block that is not called, and one called twice",
        "several tensors, one given twice",
        "nests of tensors, by name",
        "inputs written in place",
        "outputs written in place by the model",
        "autocast around the model",
        "a forward without gradients before",
        "encoder layers of torch",
    ),
    "tests/strategies/budget/eager/test_idioms.py::test_an_idiom_between_linears[at a first call": (
        *("multi-head attention]", "a hook", "batch norm, units in place", "noise of an own"),
        *("a gradient inside", "a reentrant checkpoint"),
    ),
    "tests/strategies/budget/eager/test_idioms.py::test_in_place_on_what_a_linear_made[at a first call": (
        "index_put_",
    ),
    "tests/strategies/budget/eager/test_idioms.py::test_an_idiom_around_blocks[at a first call": (
        "without gradients before",
    ),
    "tests/strategies/budget/eager/test_carried_out.py::test_the_peak_is_the_predicted_one": ("[dropout",),
    "tests/strategies/budget/planning/test_planner.py::test_little_room": ("[1-0.0", "[16384", "[65536"),
    "tests/strategies/budget/planning/test_planner.py::test_plans_keep_their_budgets": ("[0.0]",),
    "tests/strategies/budget/planning/test_autograd_bound.py::test_no_schedule_of_a_w": ("[4-", "-outside"),
    "tests/strategies/budget/planning/test_scheduled_planner.py::test_the_peak": ("first-0.1",),
    "tests/strategies/budget/compiled/test_compiled_planning.py::test_generated_kernels": (),
    "tests/strategies/budget/compiled/test_compiled_ranks.py::test_generated_kernels": (),
    "tests/strategies/budget/compiled/test_compiled_planning.py::test_a_compiled_plan_is_neutral": (
        "gpt, dropout",
    ),
    "tests/strategies/budget/compiled/test_compiled_planning.py::test_a_budget_that_needs_nothing": (),
    "tests/strategies/budget/compiled/test_compiled_ranks.py::test_a_plan_on_two_ranks": (),
    "tests/strategies/budget/compiled/test_compiled_planning.py::test_smaller_inputs": (),
    "tests/strategies/budget/compiled/test_compiled_planning.py::test_a_plan_of_something": (
        "another graph",
    ),
    "tests/harness/trial/test_compilation.py::test_buffers_of_generated_kernels": (),
    "tests/strategies/budget/planning/test_chunked_planning.py::test_the_cheapest_of_all_ways": ("time",),
    "tests/strategies/budget/planning/test_block_choice.py::test_many_equal_blocks": (
        *("-8]", "-64]", "[0.8-160]"),
    ),
    "tests/parity/test_matrix.py::test_a_budget_with_values_on_the_host": ("fsdp1 inside",),
    "tests/harness/predict/test_fake_rank.py::test_recurrent_layers": (*("GRU-none", "LSTM-offload"),),
    "tests/harness/fit/test_answer.py::test_options_are_those_of_measured_steps": (),
    "tests/acbench/test_notebook.py::test_the_notebook_runs": (),
    "tests/harness/sweep/test_checks.py::test_nothing_that_a_factory_does": (
        *("crashes", "has_no_text", "interrupts", "is_a_generator", "hangs_deaf"),
    ),
    "tests/harness/trial/test_preflight.py::test_no_tensor_of_the_driver": ("a budget", "sharding"),
    "tests/harness/trial/test_plan_budget.py::test_ranks_with_unlike_steps": (),
    "tests/harness/trial/test_run.py::test_verdict[ac=selective_op ac.save_ops=modalities": (),
    "tests/harness/fit/test_answer.py::test_an_option_that_differs": (),
    "tests/harness/report/wandb/test_workspace_report.py::test_a_loopback_stub": (),
    "tests/hydra_plugins/test_entry.py::test_a_command_whose_output": ("[acbench",),
    "tests/strategies/regions/test_split_backward.py::test_example": (),
    "tests/strategies/chunk/test_tiles.py::test_parity": ("[single",),
    "tests/strategies/chunk/test_tiles.py::test_each_named": ("[3]",),
    "tests/strategies/ac/test_laws.py::test_independence": (
        *("[full]", "[full_reentrant", "[nested]", "[offload]", "[selective_op]", "[torch_remat]"),
    ),
    "tests/strategies/ac/test_laws.py::test_parity_bit_for_bit_in_two_steps": (
        *("-none", "-full", "-selective_layer", "-selective_op", "-nested", "-offload", "-torch_remat"),
        "tied_weights-budget]",
    ),
    "tests/strategies/ac/test_laws.py::test_a_copy_of_the_model_carries_the_strategy[pickle": (
        *("-none", "-full", "-selective_layer", "-selective_op", "-nested", "-offload", "-torch_remat"),
        "pickle-budget]",
    ),
    "tests/strategies/ac/test_laws.py::test_a_copy_of_the_model_carries_the_strategy[deepcopy-budget": (),
    "tests/strategies/ac/test_laws.py::test_restraint_no_state_of_torch_is_changed[budget": (
        "[budget_by_class",
    ),
    "tests/strategies/ac/test_sharded.py::test_operators_run_again_with_the_weights": (
        *("[modules", "[budget of a product"),
    ),
    "tests/strategies/ac/test_sharded.py::test_a_budget_plans_at_the_first_call": ("[tp",),
    "tests/strategies/ac/test_budget.py::test_blocks_may_have_two_names": ("[blocks",),
    "tests/strategies/ac/test_budget.py::test_a_dimension_of_one": (),
    "tests/strategies/ac/test_megatron.py::test_a_label_frees": (
        "[llama",
        "[moe-labels5",
        "[deepseek-labels9",
    ),
    "tests/strategies/budget/eager/test_named_fates.py::test_gradients_are_bitwise": (
        *("-discarded]", "-every second operator]", "[dropout-", "[experts-", "[in place after others"),
    ),
    "tests/strategies/chunk/test_idioms.py::test_half_of_the_bytes": (
        *("convolutions and attentions", "a recurrent layer-True"),
        *("a generator of its own", "squeezes-False", "experts in one product"),
    ),
    "tests/strategies/chunk/test_changes.py::test_a_change_is_followed_or_refused": (
        *("evaluation-training", "a parameter under two names-training"),
        *(
            "a hook-training",
            "a hook-forward",
            "a hook before",
            "weight norm",
            "of the block-",
            "other layers-",
        ),
        *(
            "another class-forward",
            "another method-forward",
            "another forward",
            "frozen-forward",
            "new-forward",
        ),
        *(
            "nothing-forward",
            "another dtype-forward",
            "in place-forward",
            "a number of",
            "evaluation-forward",
        ),
    ),
    "tests/strategies/chunk/running/test_chunked_forward.py::test_plans_give_what_plain_code_gives": (
        *("norms-training", "detached-training", "halves-training"),
    ),
    "tests/strategies/chunk/planning/test_training_schedules.py::test_gradients_of_the_smallest": (
        *("fused attention of heads", "triangle"),
    ),
    "tests/strategies/chunk/planning/test_training_schedules.py::test_accepted_budgets": ("pictures",),
    "tests/strategies/chunk/planning/test_batch_schedules.py::test_a_batch_of_pictures": ("[0.3",),
    "tests/strategies/chunk/test_budget.py::test_a_shorter_input": ("[0.5]", "[2]"),
    "tests/strategies/chunk/planning/test_chunk_plan.py::test_every_accepted_budget": (
        *("fused attention of heads", "a mask of places", "pictures"),
    ),
    "tests/strategies/chunk/planning/test_head_and_loss.py::test_logits_are_never_whole": (
        *(
            "weights, smoothing and ignored-3",
            "softcap-3",
            "shifted-3",
            "log softmax-3",
            "cross entropy-1-48-",
        ),
    ),
    "tests/strategies/chunk/test_show.py::test_regions_and_code": ("chunks_gpt_training_0.3",),
    "tests/strategies/shard/test_cheapest.py::test_never_costs_more_than_megatron": (
        *("default-tp2-llama", "slow ranks-shard2_tp2-gpt"),
    ),
    "tests/harness/predict/test_batch_sizes.py::test_the_step_between": ("full AC",),
    "tests/harness/predict/test_repeated_blocks.py::test_the_composed_step": (
        *("full AC", "one region around the call"),
    ),
    "tests/harness/predict/test_fake_rank.py::test_one_rank_is_predicted": ("nested, in half precision",),
    "tests/harness/predict/test_fake_rank.py::test_ranks_are_predicted": (
        "shards on the host, and offloading",
    ),
    "tests/harness/predict/test_fake_rank.py::test_equal_shares": ("shares that differ by a token",),
    "tests/harness/predict/test_views.py::test_plans_of_unlike_ranks": ("[a ring",),
    "tests/harness/command_line/test_cli.py::test_a_signal_ends_the_sweep": (),
    "tests/harness/report/formats/test_page.py::test_the_page_draws_everything": ("wide and light",),
    "tests/slurm/test_sweeps.py::test_two_drivers_at_once": (),
    "tests/gpu/test_sharded.py::test_gloo_group_of_one": (),
    "tests/gpu/test_context.py::test_two_parts": (),
    "tests/acbench/test_fitting.py::test_the_answer_of_a_program": (),
    "tests/gallery/test_users.py::test_the_command_is_right": (),
    "tests/gallery/test_verdicts.py::test_every_verdict": ("[n0", "[n1", "[c0"),
    "tests/bench/test_peers.py::test_peers_recompute_exactly": ("every block",),
    "tests/bench/test_chunk_points.py::test_a_point_within_its_budget": ("training",),
    "tests/bench/test_gpu.py::test_every_point_of_a_sweep": ("sweep-cuda", "out_of_memory-cuda"),
    "tests/bench/test_gpu.py::test_trials_of_a_stage_run_out_of_memory": (),
}
"""Dear rows that only `make matrix` runs, by the start of their names, and words of the rows that stay.

Most show again what a kept row shows. Some do not, and `make test` lacks them for its time: Inductor under a
byte budget, compiled plans on ranks and for smaller inputs, plans of ranks with unlike steps carried out, the
page on a phone, two drivers of one Slurm sweep, a killed one, two shapes in one, the lighter variants on four
ranks, gradients of micro-batches reduced on four ranks, the end of an agent of two nodes, other axes next to
experts of stages, stages of parts of the sequence and the collectives of those parts, an option that differs
and the command of a user's model, `acbench.fit` from a program, a report in a workspace of W&B, the example
of a backward in two parts, and the files for the GPU without other packages, with a group of one and with two
parts of a context."""


GOING: dict[str, tuple[str, ...]] = {
    "tests/parity/test_matrix.py::test_is_bitwise": (
        *("[nested-gpt-shard2_tp2", "[full-gpt-hsdp2x2", "[nested-gpt-ddp2_tp2", "[nested-evoformer-shard2"),
        *("[full-evoformer-ddp2", "[full-unet-ddp2", "[full-vit-ddp2", "[offload-llama-tp2"),
    ),
    "tests/strategies/budget/planning/test_planner.py::test_little": ("[1-0.0",),
    "tests/strategies/budget/planning/test_autograd_bound.py::test_no_schedule_of_a_captured": ("[cheap",),
    "tests/strategies/chunk/planning/test_chunk_plan.py::test_every_accepted": ("[pictures",),
    "tests/strategies/shard/operators/test_operators.py::test_every_candidate": (
        *("[matmul of batches that", "[matmul of a batch with", "[addmm with a matrix", "[addmm that leaves"),
        *("[conv2d with a stride", "[sum of everything"),
    ),
    "tests/strategies/shard/operators/test_operators.py::test_an_output": (
        *("[matmul of batches that", "[matmul of a batch with", "[addmm with a bias", "[permute"),
    ),
    "tests/strategies/shard/operators/test_operators.py::test_dtensor": (
        *("[addmm with a matrix", "[addmm with a column", "[matmul of a batch with"),
    ),
    "tests/strategies/budget/compiled/test_joint_split.py::test_every": ("[False",),
    "tests/hydra_plugins/test_composition.py::test_presets": ("[fsdp_parity", "[ac_by_mesh", "[ac_matrix"),
    "tests/parity/test_sharding.py::test_random": ("[cheapest-gpt", "[megatron-mlp"),
    "tests/parity/test_sharding.py::test_a_step": ("[candidate-bf16",),
    "tests/parity/test_sharding.py::test_is_neutral_within_a": ("[bf16_mixed-megatron",),
    "tests/parity/test_sharding.py::test_a_planted_error_is_found_in": (
        *("shards-bf16]", "doubled-bf16]", "of queries and keys is lost-bf16]"),
    ),
    "tests/parity/test_pipelines.py::test_is_equal": ("[selective_op on 1f1b", "[nested on zbv"),
    "tests/parity/test_context.py::test_parts_are": ("[gather, gpt", "[ring, llama", "[ulysses, gpt"),
    "tests/parity/test_fsdp.py::test_every_variant": ("[none-", "[selective_op-fsdp1", "[full-fsdp1-call"),
    "tests/harness/trial/test_microbatches.py::test_ranks": ("[shard2-last", "[ddp2-last"),
    "tests/harness/trial/test_run.py::test_verdict": (
        *("[ac=selective_op-neutral", "[ac=offload-neutral", "[ac=selective_layer-neutral"),
        "early_stop=false-neutral",
    ),
    "tests/harness/trial/test_assemble.py::test_an_unusual": ("[reads_arrays", "[half_linears", "[all_half"),
    "tests/harness/trial/test_preflight.py::test_refuses_a_mesh": ("microbatches=4 model=evoformer",),
    "tests/harness/report/test_odd_records.py::test_a_report": (
        *("[a mesh of words", "[no groups", "[a folder", "[zeros", "[a list of fields", "[a foreign plan"),
        *("[an odd environment", "[a huge integer"),
    ),
    "tests/harness/check/test_neutrality.py::test_passes": ("[a save list", "[a hook with state", "[torch's"),
    "tests/gallery/test_meshes.py::test_a_defect": ("[uncut", "[stale_backward", "[unreduced"),
    "tests/strategies/chunk/test_changes.py::test_inputs": (
        "[one tensor first-forward",
        "[two tensors first-training",
    ),
    "tests/strategies/chunk/running/test_proof.py::test_what_layers": ("[an attribute of",),
    "tests/strategies/chunk/planning/test_chunk_plan.py::test_the": ("[fused attention]",),
    "tests/strategies/chunk/planning/test_head_and_loss.py::test_logits": ("[weights, smooth",),
    "tests/strategies/budget/planning/test_rerun.py::test_time": ("[time-0.0-False", "[flops-1.0"),
    "tests/strategies/budget/planning/test_rerun.py::test_bytes": ("-1]", "-2]"),
    "tests/strategies/budget/planning/test_lower_bound.py::test_moments": (
        *("[1-", "[4-", "[6-", "[10-", "[12-", "[14-", "[16-", "[17-", "[18-"),
    ),
    "tests/strategies/budget/planning/test_group_simulation.py::test_pred": ("[in the middle", "half kept"),
    "tests/strategies/budget/eager/test_random_networks.py::test_random": ("[4]",),
    "tests/strategies/budget/eager/test_chained_tape.py::test_bytes": ("[[(0, 2)]", "[[(1, 3), (4, 6)]-0.4"),
    "tests/strategies/budget/eager/test_idioms.py::test_an_idiom_between": (
        *(
            "[planned from a step-multi-head",
            "[planned from a step-noise]",
            "[planned from a step-attention of",
        ),
        "[planned from a step-expanded",
    ),
    "tests/strategies/budget/eager/test_idioms.py::test_a_first_call_leaves": (
        *("[a list in a closure", "[one in a list", "[a tally", "[an attribute of a function that"),
        *("[an older one of NumPy", "[a default by name"),
    ),
    "tests/strategies/budget/eager/test_beside.py::test_what_keeps": (
        *("[a head of the last", "[outputs of the embedding", "[an embedding before", "[a norm called twice"),
        *("[an embedding that is looked", "[a norm between"),
    ),
    "tests/strategies/ac/test_sharded.py::test_parity_bit": (
        *("fsdp1_flat-inside-", "fsdp1_no_shard-inside-", "fsdp2_no_reshard-inside-s"),
        *("tp_dtensor_activations-inside-", "fsdp1-inside-s"),
    ),
    "tests/strategies/chunk/test_changes.py::test_a_change": (
        *("[a number of an object of an object-forward", "[a number of the class-forward"),
        *("[another class-forward", "[other layers-training"),
    ),
    "tests/strategies/chunk/flow/test_chunk_rules.py::test_chunks_give": (
        *(
            "[5-rows of a batch with places",
            "[5-rows of a shortcut",
            "[5-rows of two",
            "[1-rows of a batch with",
        ),
        *("[5-rows of a batch, turned", "[1-rows of a batch, turned"),
    ),
    "tests/strategies/chunk/running/test_chunked_forward.py::test_state": ("[_Averages",),
    "tests/strategies/chunk/running/test_chunked_forward.py::test_channels": ("[evaluation",),
    "tests/harness/predict/test_batch_sizes.py::test_steps": ("[another word", "[another type"),
    "tests/harness/predict/test_prediction.py::test_tokens": ("[shard4", "[single"),
    "tests/parity/test_fsdp.py::test_hybrid": (
        "[inside_fsdp-_HYBRID",
        "[outside_fsdp-HYBRID",
        "[call_site-_HYBRID",
    ),
    "tests/strategies/budget/planning/test_block_choice.py::test_many": ("[0.8-160",),
    "tests/hydra_plugins/test_composition.py::test_points_are": (
        "[a string",
        "[an integer for",
        "[a truth",
        "[a list",
        "[a mapping",
        "[a number for a string inside",
        "[nothing inside",
        "[the same value again",
        "[an added value",
        "[a value inside of nothing",
    ),
    "tests/harness/command_line/test_schema.py::test_yaml": (
        *("[chunk=minimum", "[shard=candidate", "[shard=cheapest", "[chunk=tiles"),
    ),
    "tests/harness/command_line/test_schema.py::test_every_option": (
        "[chunk=minimum",
        "[mesh=pp2",
        "[mesh=shard2_pp2",
        "[chunk=tiles",
        "[shard=candidate",
        "[shard=cheapest",
    ),
    "tests/strategies/chunk/test_idioms.py::test_half": (
        *("[convolutions and attentions-True", "[squeezes-False", "[experts in one product-False"),
    ),
    "tests/strategies/budget/planning/test_planner.py::test_a_call": ("[no operator",),
    "tests/strategies/budget/planning/test_planner.py::test_what_may": ("[aten.silu",),
    "tests/gallery/test_users.py::test_the": (
        "[SwitchesWay",
        "[HookThatCounts",
        "[AttributeOfA",
        "[input_cleared",
        "[slope_bound",
        "[gain_enclosed",
    ),
    "tests/harness/check/test_on_ranks.py::test_all_ranks_say": ("[FSDP, micro", "[FSDP, dropout"),
    "tests/strategies/ac/test_budget.py::test_a_budget_that": ("[more bytes",),
    "tests/strategies/ac/test_budget.py::test_compiled": ("[a block-at its",),
    "tests/harness/predict/test_fake_rank.py::test_recurrent": ("[GRU-none",),
    "tests/harness/trial/test_plan_budget.py::test_a_budget_that_only": ("[0.305",),
    "tests/harness/report/wandb/test_publisher.py::test_a_broken": ("[replies",),
    "tests/bench/test_gpu.py::test_every_point": ("[sweep-cuda",),
    "tests/strategies/shard/model/test_odd_models.py::test_every": (
        "[hook before a block",
        "[hook after the model",
        "[divides by its",
        "[loops over",
        "[tied embedding",
        "[repeated heads",
        *("[hook after a block", "[hook after a norm", "[two blocks", "[sequence first", "[keyword calls"),
        *("[adds positions", "[views to sizes", "[head with another"),
    ),
    "tests/strategies/budget/eager/test_idioms.py::test_an_idiom": (
        "[planned from a step-autocast]",
        "[planned from a step-foreach",
        "[planned from a step-two views",
        "before a product with a mask",
        "[at a first call-a gradient inside",
        "[at a first call-a reentrant",
        "[at a first call-batch norm",
        "[at a first call-noise of an own",
        "nests of tensors",
    ),
    "tests/strategies/shard/model/test_odd_models.py::test_every_plan_c": (
        "[splits features",
        "[unbinds",
        "[weight norm",
        "[linear with another",
        "[orthogonal head",
        "[learned scale",
        "[group norm",
        "[branches over",
        "[hook behind",
        "[divides by the batch",
        "[checks a size",
    ),
    "tests/gallery/test_verdicts.py::test_every": ("[n04", "[n14", "[n15", "[n17", "[c05"),
    "tests/strategies/shard/operators/test_operators.py::test_every_candidate_e": (
        "[matmul of a vector",
        "[sum]",
        "[permute]",
        "[addmm with a column",
        "[elementwise of three",
    ),
    "tests/strategies/shard/operators/test_operators.py::test_an_output_m": ("[bmm]", "[layer_norm]"),
    "tests/strategies/shard/operators/test_operators.py::test_dtensor_t": ("[matmul of batches that",),
    "tests/hydra_plugins/test_composition.py::test_points_are_w": (
        "[an unknown value]",
        "[a value inside a value]",
        "[a value inside the same value]",
        "[a deletion of the same",
        "[an escaped",
        "[an option that writes",
        "[a preset that makes a mapping",
    ),
    "tests/hydra_plugins/test_composition.py::test_values": (
        "[a value of a group that is gone",
        "[an added value that is there",
        "[values of one name",
        "[a value twice",
    ),
    "tests/harness/command_line/test_cli.py::test_a_refused": (
        "[a typo that no choice",
        "[a view of what has none",
    ),
    "tests/strategies/chunk/test_changes.py::test_a_change_i": ("[an attribute that is new-forward",),
    "tests/strategies/ac/test_sharded.py::test_operators": ("[modules and results",),
    "tests/strategies/ac/test_sharded.py::test_parity_bit_f": (
        "[fsdp1-inside-nested",
        "[fsdp2_no_reshard-inside-nested",
        "[tp_dtensor_activations-outside-nested",
    ),
    "tests/harness/trial/test_run.py::test_verdict[ac=full": ("protocol.parity_steps=3",),
    "tests/harness/trial/test_run.py::test_flops_are": ("[ac=offload",),
    "tests/parity/test_fsdp.py::test_fsdp1[": (
        "[inside_fsdp-NO_SHARD",
        "[outside_fsdp-NO_SHARD",
        "[inside_fsdp-FULL_SHARD",
    ),
    "tests/parity/test_fsdp.py::test_fsdp2[": ("[call_site-True", "[outside_fsdp-True"),
    "tests/parity/test_fsdp.py::test_hybrid_f": ("[outside_fsdp-_HYBRID",),
    "tests/parity/test_fsdp.py::test_every_variant_in": ("[offload-fsdp1-inside",),
    "tests/strategies/shard/candidates/test_redistribution.py::test_every": ("[2 x 2]",),
    "tests/strategies/shard/candidates/test_execution.py::test_every": ("[without a bias",),
    "tests/parity/test_sharding.py::test_a_planted_error_is_found_in_e": ("[a bias is dropped-bf16",),
    "tests/strategies/budget/planning/test_rerun.py::test_bytes_and": ("[dropout-3]", "again-3]"),
    "tests/strategies/chunk/planning/test_head_and_loss.py::test_logits_are": ("[softcap",),
    "tests/harness/check/test_remedies.py::test_says": (
        "[state that is put back, of ours",
        "[random state, of ours",
    ),
    "tests/bench/test_published.py::test_every": ("[C11", "[C1]"),
    "tests/harness/check/test_on_ranks.py::test_all_ranks_have": ("[ddp",),
    "tests/harness/trial/test_microbatches.py::test_ranks_reduce": ("[shard2-each",),
    "tests/harness/trial/test_microbatches.py::test_is_bitwise": ("[offload-shard2",),
    "tests/strategies/budget/eager/test_group_tape.py::test_steps_are": ("[fsdp2-group", "[ddp-chain"),
    "tests/strategies/budget/planning/test_simulation.py::test_predicted": ("[0.1-0.0-0.0", "-1.0]"),
    "tests/parity/test_sharding.py::test_checkpointing_of": ("[offload-candidate",),
    "tests/strategies/chunk/loops/test_gradients_ahead.py::test_where": (
        "[a mean of parts",
        "[rows are read twice",
    ),
    "tests/strategies/regions/test_split_backward.py::test_parts": ("[a GRU-selective_op",),
    "tests/strategies/shard/model/test_realisation.py::test_collectives": ("[cheapest on slow", "[cheapest]"),
    "tests/harness/trial/test_preflight.py::test_refuses_a_model": ("[shard=candidate shard.modules",),
    "tests/harness/experiment/test_experiment.py::test_what_follows": (
        "[a plan of experts of parts",
        "[a plan of parts in stages",
    ),
    "tests/harness/report/test_odd_records.py::test_a_report_s": ("[an integer of 5000", "[nested beyond"),
    "tests/strategies/budget/eager/test_random_networks.py::test_random_n": ("[3]",),
    "tests/strategies/shard/test_cheapest.py::test_never": ("[default-tp2-llama",),
    "tests/harness/measure/memory/test_totals.py::test_fake": ("[selective",),
    "tests/parity/test_torch_context.py::test_collectives": ("[full",),
    "tests/parity/test_dense.py::test_a_right": ("[fused heads",),
    "tests/parity/test_sharding.py::test_without": ("[full-3",),
    "tests/strategies/chunk/running/test_chunked_forward.py::test_statistics": ("[True",),
    "tests/strategies/ac/test_laws.py::test_a_copy_of_a_sub": ("[budget_by_class",),
    "tests/harness/models/test_hf.py::test_the_shipped": ("[GemmaConfig",),
    "tests/harness/predict/test_batch_sizes.py::test_steps_that": ("[an operator less",),
    "tests/harness/trial/test_assemble.py::test_ranks_train": ("[half_linears ac=full mesh=shard2",),
    "tests/strategies/budget/planning/test_known_plans.py::test_a_kept": ("[0]",),
    "tests/parity/test_chunks.py::test_chunks_are": ("[mlp-minimum-shard2-offload",),
    "tests/parity/test_experts.py::test_variants": ("[ep2_capacity, nested",),
    "tests/strategies/ac/test_laws.py::test_a_copy_of_the_model": ("[pickle-budget]",),
    "tests/strategies/budget/eager/test_ordered_tape.py::test_a_copy": ("[deepcopy",),
    "tests/strategies/budget/planning/test_planner.py::test_a_refusal": ("[a checkpoint inside",),
    "tests/strategies/chunk/planning/test_training_schedules.py::test_gradients": ("[triangle",),
    "tests/harness/check/test_neutrality.py::test_probes": ("[state shared by",),
    "tests/harness/measure/gloo/test_wait.py::test_bytes_do": ("[tp",),
    "tests/strategies/budget/planning/test_planner.py::test_little_room": ("[16384-0.0",),
}
"""Dear rows that only `make matrix` runs: starts of names, and words of what goes.

Rows that stay show the same of the same kind."""


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--fresh", action="store_true", help="run again what of tests/matrix has passed here")
    parser.addoption("--device", choices=("cpu", "cuda"), default="cpu", help="of trials of tests/matrix")
    parser.addoption(
        "--workers", type=int, default=0, metavar="N", help="run files in N forks (tests/workers.py)"
    )


def pytest_configure(config: pytest.Config) -> None:
    costs = os.environ.get("TEST_COSTS")
    config.pluginmanager.register(CpuTime(Path(costs) if costs else None))
    config.pluginmanager.register(resuming(config))
    config.pluginmanager.register(fixtures)
    if workers := config.getoption("workers"):
        config.pluginmanager.register(Workers(workers, begins=fixtures.stand_by))
    gc.disable()  # until all is collected: what is imported stays


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    items.sort(key=_place)
    expensive, repeated, going = tuple(EXPENSIVE), tuple(REPEATED), tuple(GOING)
    for item in items:
        name = item.nodeid
        # one look at all beginnings, because few names have one of them
        if name.startswith(expensive) and any(
            name.startswith(kind) and not (kept and kept in name) for kind, kept in EXPENSIVE.items()
        ):
            item.add_marker("expensive")
        if name.startswith(repeated) and any(
            name.startswith(kind) and not any(word in name for word in kept)
            for kind, kept in REPEATED.items()
        ):
            item.add_marker("matrix")
        if name.startswith(going) and any(
            name.startswith(kind) and any(word in name for word in words) for kind, words in GOING.items()
        ):
            item.add_marker("matrix")
    if config.args == config.getini("testpaths"):
        _require_representatives([item.nodeid for item in items])


def _require_representatives(names: list[str]) -> None:
    """Refuse a run of all tests in which a kind of `EXPENSIVE` or its representative is missing."""
    names.sort()  # those of one beginning stand together
    for table, kinds in (
        ("EXPENSIVE", {kind: (kept,) for kind, kept in EXPENSIVE.items()}),
        ("REPEATED", REPEATED),
        ("GOING", GOING),
    ):
        for kind, rows in kinds.items():
            of_kind = names[bisect_left(names, kind) : bisect_left(names, f"{kind}\uffff")]
            for kept in rows or ("",):
                if not any(kept in name for name in of_kind):
                    raise pytest.UsageError(f"tests/conftest.py: {table}: no test is {kind!r} with {kept!r}")


def _place(item: pytest.Item) -> int:
    return next((place for place, name in enumerate(LONG) if item.nodeid.startswith(name)), len(LONG))


def pytest_collection_finish() -> None:
    """Keep what is imported and collected, most of the heap, out of all collections of garbage."""
    gc.enable()
    gc.freeze()
