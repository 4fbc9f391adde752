"""Every model of users, its variant, and the verdict that it deserves."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import partial
from typing import Any

from tests.gallery.case import Case, Verdict
from tests.gallery.parts import Net, around, example
from tests.gallery.users import (
    containers,
    counters,
    held,
    hooks,
    hub,
    interfaces,
    operators,
    randomness,
    refusals,
    statistics,
    switches,
    unstable,
)

FULL, OP, LAYER, OFFLOAD, NESTED = (
    (f"ac={name}",) for name in ("full", "selective_op", "selective_layer", "offload", "nested")
)
WITHOUT_RNG = (*FULL, "ac.preserve_rng_state=false")
REENTRANT = (*FULL, "ac.use_reentrant=true")
SGD = (*FULL, "optimizer=sgd")

MIDDLE = "blocks.1"
"""Where a block stands that is given alone, and whom a message must blame then."""


def _case(
    verdict: Verdict, made: Callable[..., Any], variant: Any = FULL, *names: str, **facts: Any
) -> tuple[str, Case]:
    """Return the case of a factory, a model, or a block between two layers, and the name it has here."""
    make: Any = made
    if isinstance(made, type):
        make = partial(_model if issubclass(made, Net) else around, made)
    name = " ".join([made.__name__, *(variant if variant != FULL else ())])
    why = inspect.getdoc(made) or ""
    return name, Case(make=make, variant=variant, verdict=verdict, names=names, why=why, **facts)


def _model(made: type[Net]) -> Any:
    return example(made())


_neutral, _unverified, _refused = (
    partial(_case, verdict) for verdict in ("neutral", "unverified", "refused")
)


def _differs(
    made: Callable[..., Any],
    options: tuple[str, ...] = FULL,
    name: str = MIDDLE,
    *,
    part: str = "gradients",
    **facts: Any,
) -> tuple[str, Case]:
    return _case("differs", made, options, name, part=part, **facts)


CASES = dict(
    (
        # what forward counts
        _differs(counters.Counting),
        _differs(counters.Counting, ("ac=selective_layer", "ac.ac_freq=1")),
        _differs(counters.Tallying, part="state"),
        _unverified(counters.GlobalCounting),
        _unverified(counters.FunctionState),
        _differs(counters.RoundRobin),
        _differs(counters.Warmup),
        _differs(counters.metered_in_every_block, LAYER, "blocks", part="buffers"),
        _differs(counters.iterator_of_dilations, name="blocks.0"),
        _differs(counters.Scheduled),
        _differs(counters.Cooled),
        _differs(counters.CountsAfterBlocks),
        _differs(counters.GlobalStep),
        _differs(counters.StepInSlots),
        _differs(counters.class_attribute_schedule, name="blocks"),
        _differs(counters.CountReadByNextStep, part="state"),
        _differs(counters.MoreDropout),
        _differs(counters.SharedBlock, name="blocks.0"),
        _differs(counters.DepthOfTheClass, name="blocks"),
        _refused(counters.FirstCall),
        _differs(counters.HookThatCounts),
        _differs(counters.GainInAClosure),
        _differs(counters.ActivationThatCounts),
        _differs(counters.AttributeOfAFunction, name="", part=""),
        _differs(counters.Alternating),
        _differs(counters.StepInATensor),
        _differs(counters.ActiveUnits, part="state"),
        _neutral(counters.ProgressiveUnfreezing),
        _neutral(counters.CountsOutside, reads=()),
        _neutral(counters.CountsAnew),
        _neutral(counters.CountsInForwardOnly, reads=()),
        _neutral(counters.RowsInABuffer, reads=()),
        _neutral(counters.NamesInTurn, reads=()),
        # random numbers
        _neutral(randomness.Dropping),
        _differs(randomness.Dropping, WITHOUT_RNG),
        _differs(randomness.Jittering, WITHOUT_RNG),
        _neutral(randomness.DropPath, reads=("drop_prob",), tolerated=("training",)),
        _neutral(randomness.stochastic_depth),
        _neutral(randomness.NoisyExperts, OP),
        _neutral(randomness.SeedsItself),
        _neutral(randomness.draws_in_every_backward),
        _differs(randomness.RandomGain),
        _differs(randomness.CutMix, OP),
        _differs(randomness.OwnGenerator),
        _differs(randomness.NumpyGenerator, OP),
        _differs(randomness.PythonGenerator),
        _differs(randomness.SampledLogging, name="", part="rng_state"),
        _differs(randomness.GeneratorAsArgument, name="blocks"),
        _differs(randomness.SeedsInForward, name="blocks"),
        _neutral(randomness.ShuffledOnce, reads=()),
        _neutral(randomness.Augments, reads=()),
        _neutral(randomness.DrawsOutside, reads=()),
        _neutral(randomness.FixedNoise, reads=("noise",)),
        # running statistics, codebooks, caches
        _differs(statistics.BatchNorm, part="buffers"),
        _differs(statistics.batch_norm_in_every_block, LAYER, "blocks", part="buffers"),
        _differs(statistics.RunningNorm),
        _differs(statistics.RunningScale),
        _differs(statistics.Whitened),
        _differs(statistics.Codebook),
        _differs(statistics.DelayedScaling, OP),
        _differs(statistics.Spectral),
        _differs(statistics.Balanced),
        _differs(statistics.Histogram),
        _differs(statistics.Remembering),
        _differs(statistics.Growing),
        _differs(statistics.Logging, part="state"),
        _differs(statistics.LoggingHook, part=""),
        _differs(statistics.SharedLosses, name="", part="state"),
        _differs(statistics.Recent),
        _differs(statistics.DequeReadByNextStep, OP, part="state"),
        _differs(statistics.LengthOfALog),
        _differs(statistics.Teacher, part="parameters"),
        _differs(statistics.Decaying),
        _differs(statistics.DecayingByData),
        _neutral(statistics.Clipped),
        _neutral(statistics.running_maximum_in_every_block),
        _neutral(statistics.ActNorm),
        _neutral(statistics.caches_rebuilt_in_forward, LAYER),
        _neutral(statistics.LastNorm),
        _neutral(statistics.TableInAGlobal),
        _neutral(statistics.LogsNorms, reads=()),
        _neutral(statistics.AverageOfTheHead, reads=()),
        _neutral(statistics.MeanGoesInAsACopy, reads=()),
        # modes, globals, arguments, aliases
        _differs(switches.attribute_set_for_forward_only),
        _differs(switches.global_setting_for_forward_only, OP),
        _differs(switches.DefaultDtypeModel),
        _differs(switches.loss_leaves_eval_mode),
        _differs(switches.gradient_hook_changes_phase, name="blocks.2"),
        _differs(switches.weight_noise_taken_away, LAYER, "blocks"),
        _differs(switches.feature_queue_filled_after_blocks, name="blocks.2"),
        _differs(switches.list_argument_grows, name="blocks"),
        _differs(switches.dict_argument_counts_layers, OP, "blocks"),
        _refused(switches.InplaceResidual),
        _differs(switches.tensor_in_dict_changed_in_place),
        _differs(switches.ClampsSaved, OFFLOAD),
        _differs(switches.Loaded),
        _neutral(switches.LeafMode),
        _neutral(switches.output_changed_in_place_by_model, NESTED),
        _refused(switches.SetsEnvironment),
        _differs(switches.SetsThreadFlag),
        _refused(switches.Freezing),
        _differs(switches.Growing),
        _differs(switches.SwapsActivation),
        _differs(switches.Pushes),
        _differs(switches.names_seen_in_this_forward, name="blocks"),
        _differs(switches.dataclass_argument_that_counts, name="blocks"),
        _refused(switches.mask_on_a_context_cleared_after_forward),
        _differs(switches.cached_tensor_cleared, name=r"blocks\.0"),
        _differs(switches.host_array_of_all_blocks, name="blocks"),
        _differs(switches.SetsTemperature),
        _differs(switches.input_cleared_after_the_call, name="blocks"),
        _differs(switches.list_argument_popped, name="blocks"),
        _differs(switches.buffers_swapped, name="blocks.0"),
        _differs(switches.adapter_of_a_hook),
        _differs(switches.SetsContext),
        _differs(switches.partial_replaced),
        _differs(switches.Cools),
        _differs(switches.AsksForGradients, REENTRANT, name="", part=""),
        _differs(switches.SwitchesWay),
        # what a recomputation finds as forward did
        _neutral(held.Flagged, reads=(), tolerated=("use_gelu",)),
        _neutral(held.Masked, reads=("masks",)),
        _neutral(held.Strong, reads=("(?i)strength",)),
        _neutral(held.number_attribute, reads=("scale",)),
        _neutral(held.number_attribute, REENTRANT, reads=("scale",)),
        _neutral(held.number_attribute, (*OP, "ac.save_ops=[matmul]")),
        _neutral(held.adapter_chosen_before_the_step, reads=("active",)),
        _neutral(held.Careful, reads=()),
        _neutral(held.TrainsOtherwise, reads=("training|mode",)),
        _neutral(held.Lazy, reads=("table",)),
        _neutral(held.rotary_cache, reads=("cos_cached", "sin_cached")),
        _neutral(held.attention_mask_built_once, reads=()),
        _neutral(held.Normed, reads=("eps",), tolerated=("training",)),
        _neutral(held.WeightNormed, reads=(), tolerated=("dim",)),
        _neutral(held.Ramped, reads=()),
        _neutral(held.FixedSlope, reads=("SLOPE",)),
        _neutral(held.Settled, reads=("SETTINGS|slope",)),
        _neutral(held.gain_enclosed_by_an_activation, reads=("gain",)),
        _neutral(held.slope_bound_by_a_partial, reads=("act|negative_slope",)),
        _neutral(held.number_of_a_config, reads=("damping",)),
        _neutral(held.number_of_a_namespace, reads=("damping",)),
        _neutral(held.Listed, reads=("alphas",)),
        _neutral(held.norm_and_dropout, reads=("eps", r"\bp\b"), tolerated=("training",)),
        _neutral(held.Skips, reads=()),
        _neutral(held.Distils, reads=()),
        _neutral(held.LayerScaled),
        _neutral(held.DropsByAttribute),
        # hooks and side channels
        _neutral(hooks.ClippedBlock),
        _neutral(hooks.module_backward_hooks),
        _neutral(hooks.state_dict_hooks, OFFLOAD),
        _neutral(hooks.auxiliary_loss_in_attribute),
        _refused(hooks.features_cleared_by_loss),
        _neutral(hooks.features_cleared_before_forward, OP),
        _neutral(hooks.Surprise),
        _neutral(hooks.legacy_weight_norm, LAYER),
        _neutral(hooks.constant_in_the_closure_of_a_hook),
        _neutral(hooks.ClipsGradients, reads=()),
        _neutral(hooks.Adversarial, reads=()),
        # how blocks are called, and what they return
        _neutral(interfaces.keywords_only),
        _neutral(interfaces.dict_in_dict_out, OP),
        _neutral(interfaces.dataclass_blocks),
        _neutral(interfaces.namedtuple_with_unread_field, OFFLOAD),
        _neutral(interfaces.attribute_dict_with_all_states, LAYER),
        _neutral(interfaces.call_override_with_python_inputs),
        _neutral(interfaces.no_inputs, OP),
        _neutral(interfaces.none_and_strings_between_blocks, NESTED),
        _neutral(interfaces.options_made_for_each_block),
        _neutral(interfaces.value_residual_as_an_argument),
        # where blocks stand
        _neutral(containers.module_dict_out_of_order),
        _neutral(containers.one_block_in_three_places),
        _neutral(containers.siamese_calls_twice, OP),
        _neutral(containers.tied_weights_across_blocks, OFFLOAD),
        _neutral(containers.skipped_and_early_exit),
        _neutral(containers.nested_container_path, NESTED, layers_fqn="body.stages.0.main"),
        _neutral(containers.deepcopied_teacher_with_lock),
        _neutral(containers.delegating_wrappers_with_alias, LAYER),
        _neutral(containers.parameters_in_one_storage),
        _neutral(containers.lora_on_frozen_base),
        _neutral(containers.lora_on_frozen_base, LAYER),
        _neutral(containers.words, SGD),
        _refused(containers.words),
        _neutral(containers.tied_linears, reads=()),
        # dtypes, transforms, operators
        _neutral(operators.bf16_blocks_in_fp32_model),
        _neutral(operators.bf16_blocks_in_fp32_model, NESTED),
        _neutral(operators.complex_fourier_layers, OP),
        _neutral(operators.complex_fourier_layers, LAYER),
        _neutral(operators.float64_wavefunction),
        _neutral(operators.autocast_around_blocks),
        _neutral(operators.Quantised),
        _neutral(operators.inplace_conv_channels_last, OFFLOAD),
        _neutral(operators.lstm_on_packed_sequences, LAYER),
        _neutral(operators.state_space_scan, OP),
        _neutral(operators.numpy_in_forward),
        _neutral(operators.weight_norm_and_orthogonal, OP),
        _neutral(operators.parametrization_cache),
        _neutral(operators.vmap_ensemble),
        _neutral(operators.Hyper, OFFLOAD),
        _neutral(operators.OwnCheckpoint),
        _neutral(operators.Compressed),
        _neutral(operators.OldCheckpoint, LAYER),
        _neutral(operators.CountFlops, OP),
        _neutral(operators.loss_with_one_element, OFFLOAD),
        _neutral(operators.tensor_subclass_through_blocks, LAYER),
        _neutral(operators.masked_rows_only),
        _neutral(operators.jagged_nested_tensors),
        _neutral(operators.sparse_embedding_made_dense, OP),
        _neutral(operators.fused_attention, OP),
        _neutral(operators.gradient_penalty),
        _neutral(operators.FrozenNorm),
        _neutral(operators.FrozenNorm, OFFLOAD),
        _neutral(operators.Gru),
        _neutral(operators.Attending),
        _neutral(operators.Halting),
        _neutral(operators.Standardised),
        _neutral(operators.Causal),
        _neutral(operators.Gated),
        _neutral(operators.Sorted),
        _neutral(operators.Scattered),
        # nothing can be verified
        _unverified(unstable.TimeEmbedding, part="outputs"),
        _unverified(unstable.operating_system_noise, part="outputs"),
        _unverified(unstable.set_of_modules, part="outputs"),
        _unverified(unstable.Parallel, part="outputs"),
        _unverified(unstable.AddressSeed, LAYER, part="outputs"),
        _unverified(unstable.all_gradients_zero, part="gradients"),
        _unverified(unstable.all_gradients_nan, part="gradients"),
        _unverified(unstable.Salted),
        _unverified(unstable.Numbered),
        _unverified(unstable.Infinite),
        _unverified(unstable.zero_head),
        _unverified(unstable.detached),
        _neutral(unstable.checkpointed_head),
        _refused(unstable.no_module),
        # no trial ends well
        _refused(refusals.Strict),
        _refused(refusals.loss_per_row),
        _refused(refusals.loss_with_logs),
        _refused(refusals.loss_as_python_number),
        _refused(refusals.blocks_in_python_list),
        _refused(refusals.inputs_not_in_a_tuple),
        _refused(refusals.blocks_pop_their_skips),
        _refused(refusals.Memoised),
        _refused(refusals.Energy),
        _refused(refusals.threshold_of_last_call_changes_shapes),
        _refused(refusals.scripted_blocks),
        # transformers
        _neutral(hub.gpt2_with_default_cache, layers_fqn="transformer.h"),
        _refused(hub.gpt2_eager_with_default_cache, layers_fqn="transformer.h"),
        _neutral(hub.t5_with_labels, layers_fqn="inner.decoder.block"),
        _neutral(hub.bert_classifier, OP, layers_fqn="inner.bert.encoder.layer"),
    )
)
"""By name: that of the factory, and the options where they are not `ac=full`."""
