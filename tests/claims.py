"""What the pages claim, and which test holds it.

A page that states a figure of ours, or that something is exact, has rows here: words as they stand in the page, and
the test without which they might become false unnoticed. The test of a promise checks the promise. A measured figure
is one of a machine and a day: its test runs what measures it, small, and holds what is true on every machine (an
order, a bound, equal losses). Figures of scripts that no test runs are listed in ``WITHOUT_A_TEST``.
"""

from __future__ import annotations

from typing import NamedTuple


class Claim(NamedTuple):
    """Words of a page, and the test that holds them, by its path below ``tests``."""

    page: str
    words: str
    test: str


def claims_of(table: str) -> tuple[Claim, ...]:
    """Of lines that are indented by their kind: the page, its words by two spaces, their test by four."""
    claims, page, words = [], "", ""
    for line in table.strip().splitlines():
        if line.startswith("    "):
            claims.append(Claim(page, words, line.strip()))
        elif line.startswith("  "):
            words = line.strip()
        else:
            page = line
    return tuple(claims)


CLAIMS = claims_of("""
README.md
  checkpoints work both ways
    hosts/test_equal.py::test_evenload_is_switched_off_and_on_in_the_middle_of_an_epoch_as_if_never_stopped
  The same global batch gives the same loss and gradients as plain training, to rounding.
    commands/test_verify.py::test_every_layout_is_exact
  Where packing is not exact for them, the script trains unmodified and a warning says why.
    hosts/test_messages.py::test_a_script_that_nothing_is_exact_for_stays_as_it_is_and_says_so
  No plan is predicted slower than a simple baseline that keeps the same caps and settings
    core/planning/test_judge.py::test_no_plan_is_slower_than_a_lawful_row_of_its_table
  Caps on tokens and memory hold for every plan that trains.
    independent/test_drawn_plans.py::test_any_recipe_is_planned_under_its_caps_or_refused
  a rank that dies, raises, freezes or hangs ends the job with one message
    benchmarks/faults/test_faults.py::test_jobs_that_fail_end_with_one_message_and_lose_nothing
  Every hook can be taken out again and leaves the trainer as it was.
    patches/test_orders.py::test_every_order_leaves_each_symbol_wrapped_once_or_original
  | 2026-11-22 | 2.46x to 3.97x |
    hosts/test_benchmarks.py::test_pairs_are_equal_and_less_is_computed
  | 2026-11-23 | 2.43x | 1.25x
    commands/test_bench.py::test_repeats_alternate_and_one_run_shows_what_disturbs_it
  Gradients differ from plain training by 1e-15 in float64
    integrations/megatron/test_exactness.py::test_float64_gradients_are_those_of_plain_training
  off by 7.1 % on average, 24 % at worst
    benchmarks/costs/test_costs.py::test_errors_are_those_of_the_steps
docs/audit.md
  Rounding is 1e-4 of a token's hidden state in float32
    integrations/huggingface/test_audit.py::test_right_batches_are_right
  plants each of these wrongs in a script's own batches
    integrations/huggingface/test_audit.py::test_attention_across_samples_is_found
docs/clusters.md
  Ranks compare them before the model is built: lengths and the tokens of 256 samples
    commands/test_train.py::test_ranks_that_would_read_other_samples_of_the_same_lengths_train_nothing
  Ranks that lack them are named within 15 s by all others
    hosts/test_messages.py::test_a_rank_without_evenload_is_named_and_not_waited_for
  no step begins that might end after the limit
    training/test_early_end.py::test_no_step_begins_that_might_end_behind_the_limit
  in 98 of 100 cases exit code, checkpoint, samples and losses were those of an undisturbed run
    benchmarks/faults/test_faults.py::test_a_job_that_is_told_to_end_keeps_the_step_that_ran
docs/compare.md
  Intervals are 95 %, by a bootstrap over prompts; that of people is theirs
    plugins/verdicts/test_compare.py::test_intervals_cover_the_rate_at_equal_style
  the interval holds 50 %, fewer than 6 prompts count
    plugins/verdicts/test_compare.py::test_five_prompts_are_too_few_however_they_end
  is missed by n of them with probability (1 - p)^n
    core/test_corrected_mean.py::test_rare_errors_are_missed_as_often_as_it_says
docs/concept.md
  a plan within 0.1 % of its certified bound is taken as it is
    core/planning/test_judge.py::test_a_gradient_sum_that_is_not_hidden_counts_as_next_to_the_bound_of_a_large_batch
  every token of every sequence is planned exactly once, forward and backward
    core/test_laws.py::test_each_law_refuses
  the trainer's own averaging is undone exactly once
    integrations/megatron/test_training.py::test_every_layout_trains_alike
  does not call a step exact whose planner failed
    commands/test_verify.py::test_planners_that_failed_are_not_exact_however_well_the_simpler_plan_ran
  By default it waits 5 % of its predicted seconds, and what earlier steps left of theirs
    core/planning/test_planner.py::test_a_step_waits_a_share_of_itself_and_what_earlier_ones_left
  There a rule runs where the plugins take more than 0.1 s and 5 % of the step
    core/planning/test_stages.py::test_in_line_a_rule_runs_where_a_whole_plan_gains_less_than_it_takes
  256 samples are compared whole
    data/test_content.py::test_one_changed_row_of_a_small_set_and_another_loss_are_other_data
docs/costs.md
  mean absolute error 7.1 %
    benchmarks/costs/test_costs.py::test_errors_are_those_of_the_steps
  | all | 54 | | 0.8 %, 8.5 % | 0.5 %, 4.8 % |
    training/profiling/test_memory.py::test_real_trainers_hold_what_is_predicted
  fit: mean error 2.1 % forward and 2.6 % backward over 11 shapes
    commands/test_profile.py::test_the_fit_finds_the_planted_coefficients
docs/data.md
  A batch never mixes epochs
    data/test_order.py::test_a_batch_never_mixes_epochs
  3 and 1 are 75 % and 25 % of the samples
    data/test_mixture.py::test_shares_move_no_order_and_counts_follow_them
  draws the same samples to the last one
    training/test_mixture.py::test_a_killed_run_goes_on_with_the_same_draws_on_fewer_ranks
  drawing 5.5 us a sample of 4 domains
    benchmarks/training/test_training.py::test_one_order_and_mixtures_of_many_have_a_row_each
docs/deepspeed.md
  Weights of a folder are bit-equal to `from_pretrained`'s
    integrations/deepspeed/test_pretrained.py::test_every_family_comes_and_leaves
  ZeRO 0 to 3; 1e-9 in float64 | 2e-6 |
    integrations/deepspeed/test_slices.py::test_gradients_are_those_of_plain_training
  own backward groups, ZeRO 0 to 3; 1e-9 in float64
    integrations/deepspeed/test_slices.py::test_every_plan_is_exact_in_float64
  ZeRO 0 to 3, with and without recomputation | 4.7e-7 |
    integrations/deepspeed/test_shared.py::test_gradients_are_those_of_plain_training
  losses within 8e-8 | 5.0e-7 |
    integrations/deepspeed/pipeline/test_pipeline.py::test_stages_give_the_gradients_of_plain_training
  adapters after three steps 2e-6
    integrations/deepspeed/test_tenants.py::test_adapters_after_three_steps_are_those_of_each_tenant_alone
  and go on under Megatron-Core and back
    integrations/deepspeed/test_tenants.py::test_a_tenant_goes_on_under_the_other_trainer
  the step follows the exact mean over the target tokens of the global batch
    integrations/deepspeed/unmodified/test_script.py::test_every_stage_takes_exact_steps_and_disable_restores_every_symbol
docs/experts.md
  | float64, ep 2, packs | 4e-15 | 0 |
    integrations/megatron/test_experts.py::test_float64_is_that_of_plain_training
  sequences shared by ring, all-gather, all-to-all and hybrid | 1e-14 | 0 |
    integrations/megatron/test_experts.py::test_sequences_that_ranks_share
  1e-15) for z-loss, `seq_aux_loss`, sigmoid scores, biases and a shared expert
    integrations/megatron/unmodified/test_order.py::test_random_plans_give_the_gradients_of_a_stock_loop_with_experts
  within 1e-15 of the loop without evenload for `aux_loss`
    integrations/megatron/unmodified/test_together.py::test_an_order_of_whole_micro_batches
  gradients within 1.3e-6 of plain training with all experts on every rank
    integrations/deepspeed/test_experts.py::test_divided_experts_are_exact
  It is a transport problem with an exact answer in closed form.
    core/experts/test_exact.py::test_no_rank_is_over_its_share_and_each_takes_from_at_most_one_other
  asks no more than 5 % over the mean
    core/experts/test_exact.py::test_a_share_is_the_mean_rounded_up_or_the_tolerance_rounded_down
  `evenload verify` calls it not exact, exit code 1
    commands/test_verify.py::test_planners_that_failed_are_not_exact_however_well_the_simpler_plan_ran
  | EP 4; EP 2 x DP 2; PP 2 x EP 2 | 6.2e-15; 2.8e-14; 6.4e-15 |
    integrations/megatron/test_experts.py::test_copies_where_tokens_come_from
  gives the gradients of the same loop without the plugin to 1e-9
    integrations/megatron/unmodified/test_order.py::test_a_users_loop_copies_experts
  drawn quotas came to 4.2e-7 at most in 48 cases
    integrations/deepspeed/test_experts.py::test_divided_experts_are_exact
  `sharded` equals `home` to 4e-16 through updates
    integrations/megatron/test_experts.py::test_cut_experts_take_the_same_steps_and_share_checkpoints
  `recipes/moe.yaml` has a speedup of 1.08x over static placement
    benchmarks/experts/test_experts.py::test_the_table_has_a_row_a_variant_and_ratios_of_baselines_alone
  | GLM4.5-106B | 90.6 % | 92.2 % | 112.5 % | 130.1 % | 109.4 % |
    benchmarks/experts/test_experts.py::test_copies_and_tokens_that_go_once_to_a_node_are_ahead_of_even_routing
docs/faults.md
  | a rank raises | that rank, with its traceback
    runtime/watchdog/test_watchdog.py::test_one_message_names_the_rank_that_fails_and_shows_where_it_stands
  | a rank is killed or crashes | the launcher
    training/launching/test_verdict.py::test_what_no_rank_can_say_the_launcher_says
  more than 5 % of a core, or 16 KiB a second
    runtime/watchdog/test_evidence.py::test_computing_is_work
  quantities of clusters and costs | 0, or between 1e-50 and 1e24
    core/input/test_bounds.py::test_quantities_are_nothing_or_of_a_size_that_can_be_multiplied
docs/finetuning.md
  does not change training by a single bit
    training/validation/test_validation.py::test_they_disturb_nothing_and_go_on_after_a_resume
  | 2.4x over padded micro-batches of 8, 1.25x over best-fit packs |
    commands/test_bench.py::test_repeats_alternate_and_one_run_shows_what_disturbs_it
  | a validation, over padded batches of 8 | 2.7x (Megatron-Core), 3.0x (DeepSpeed) |
    benchmarks/finetuning/test_finetuning.py::test_the_table_compares_every_variant_with_evenload
  most does so by 1.5e-5 of what training moved it
    commands/test_finetune.py::test_a_tiny_model_learns_is_validated_and_leaves_alike_by_both_trainers
docs/generation.md
  | fp64 | all equal | within 1e-9 |
    plugins/rollout/test_verify_generation.py::test_every_layout_generates_what_plain_generation_does
  in float32 under DeepSpeed 8.8e-8
    integrations/deepspeed/test_generate.py::test_samples_are_those_of_plain_generation
  What is kept depends on the samples alone
    plugins/rollout/test_generate_collects.py::test_what_is_kept_is_the_same_on_any_ranks_and_after_a_kill
  as *more than* its tokens, exactly
    plugins/rollout/test_lengths.py::test_samples_that_were_cut_are_longer_than_the_cut
  nothing while ranks are even to 2 %
    plugins/rollout/test_moves.py::test_moves_even_what_is_left_and_never_worsen_it
  554 s where the first two give 470 s
    plugins/rollout/test_moves.py::test_few_samples_in_a_step_raise_the_bound_and_equal_ones_reach_it
  spreading gains 5 to 26 % over whole groups on a rank
    benchmarks/rollouts/test_rollouts.py::test_spreading_gains_over_groups_and_moving_more
  score is worse than plain E wherever requests wait, by 3 to 26 %
    benchmarks/rollouts/test_rollouts.py::test_orders_that_know_lengths_wait_less_than_first_come
docs/huggingface.md
  below 1e-9 for plans of `packing` (packs; slices)
    integrations/huggingface/test_trainer.py::test_plans_of_the_packing_plugin_are_exact
  and `mesh` (shared samples)
    integrations/huggingface/test_trainer.py::test_plans_of_the_mesh_plugin_are_exact
  We cannot know in advance whether packing is exact for your model and loss
    integrations/huggingface/test_proof.py::test_what_is_not_exact_in_packs_stays_as_it_is_and_is_named
  holds seventeen loops of Accelerate
    integrations/huggingface/test_accelerate.py::test_loops_that_are_planned_train_as_without_evenload
  fifteen scripts that change batches on their way, to the same 1e-9
    integrations/huggingface/test_changes.py::test_what_a_script_makes_of_its_batches_is_what_is_planned
docs/lora.md
  each exactly as if it were alone
    integrations/megatron/test_tenants.py::test_random_plans_give_each_tenant_what_it_gets_alone
  | Megatron-Core, float64, random plans | peft on Transformers' model | DP 2, TP 2, PP 2 | 8e-13 | 5e-13 |
    integrations/megatron/test_peft.py::test_three_steps_in_company_are_those_of_peft_alone
  | DeepSpeed, float32, `packing`, ZeRO 0 and 3 | the same | DP 2 | 9e-7 | 1e-7 |
    integrations/deepspeed/test_tenants.py::test_gradients_are_those_of_each_tenant_alone
  1.36x with 4 samples a step of each
    benchmarks/lora/test_lora.py::test_tenants_together_lose_what_each_loses_alone
  1.25x the tokens, a third of the memory
    benchmarks/lora/test_lora.py::test_a_job_each_takes_a_base_each
  | the bare frozen base (width 128, rank 16 on all layers) | 1.23x its time
    benchmarks/lora/test_lora.py::test_adapters_are_timed_over_the_bare_base
  the same winner in 1.8 times less training
    plugins/lora/sweeps/test_sweeps.py::test_a_sweep_halves_to_one_winner_that_is_what_it_would_be_alone
docs/measuring.md
  goes on to the next scorer, evenly over ranks, longest first
    core/test_cascade.py::test_what_goes_on_is_even_over_ranks_where_it_is_not_dealt_again
  `score` becomes the mean of its scores, with a 95 % interval
    core/test_cascade.py::test_the_mean_is_that_of_the_dear_one_over_draws
  is missed by n rescored ones with probability (1 - p)^n
    core/test_corrected_mean.py::test_rare_errors_are_missed_as_often_as_it_says
  A kernel is *exact* if outputs and gradients differ from float64 by at most two roundings of its dtype
    commands/first_hour/test_kernels.py::test_what_a_cpu_has_is_exact_and_what_it_has_not_is_said
  bounds them all together (900 s)
    commands/first_hour/test_first_hour.py::test_all_parts_share_a_limit
  the 95 % interval of the speedup does not hold 1
    training/test_measuring.py::test_a_difference_is_claimed_beyond_the_noise_only
  to 1e-9 in float64 under Megatron, to 2e-6
    integrations/megatron/test_score.py::test_forwards_alone_give_what_plain_ones_give
  to 2e-6 in float32 under DeepSpeed (tested)
    integrations/deepspeed/test_score.py::test_forwards_alone_give_what_plain_ones_give
  both come within 4 % of the planted ones in 16 steps
    core/costs/test_refit.py::test_a_ratio_three_times_off_is_found_whatever_the_machine
docs/megatron.md
  | 1.0e-15; verl's 7e-16 |
    integrations/megatron/unmodified/test_objective.py::test_gradients_and_reports_are_those_of_the_stock_loop
  weights 1.4e-13 | 1.0e-15 |
    integrations/megatron/unmodified/test_script.py::test_in_float64_the_same_gradients_and_weights
  1,152 tokens a rank become 348
    integrations/megatron/unmodified/test_script.py::test_packs_under_the_cap_are_computed_in_place_of_padding
  DP 2, TP 2 x PP 2 | 1.6e-15 |
    integrations/megatron/unmodified/test_order.py::test_random_plans_give_the_gradients_of_the_stock_loop
  TP 2 x DP 2, EP 2 | 1.3e-15 |
    integrations/megatron/unmodified/test_mesh.py::test_shared_samples_give_the_gradients_of_the_stock_loop
  CP 2, alone and with DP 2, PP 2, TP 2, EP 2 | within 1e-9 |
    integrations/megatron/unmodified/test_context_parallel.py::test_gradients_and_reports_are_those_of_context_parallelism
  virtual stages, multi-token prediction | within 1e-9 |
    integrations/megatron/unmodified/test_chunks.py::test_packs_give_the_gradients_of_the_interleaved_loop
  fused rotary | 2.9e-15 |
    integrations/megatron/unmodified/test_transformer_engine.py::test_shared_samples_give_the_gradients_of_the_stock_loop
  in bf16 1.1e-2 | 8.4e-16 |
    integrations/megatron/test_exactness.py::test_float64_gradients_are_those_of_plain_training
  an idle rank; in fp32 3.6e-7, in bf16 1.1e-2
    integrations/megatron/test_exactness.py::test_training_dtypes_are_right_to_their_rounding
  change from step to step, overlapped reduction | within 1e-9 |
    integrations/megatron/test_training.py::test_overlapped_reduction_is_exact_for_changing_numbers_of_micro_batches
  220 drawn schedules on PP 2, PP 4, PP 2 x DP 2
    integrations/megatron/test_pipeline.py::test_drawn_schedules_give_the_gradients_of_plain_training
  | TP 2, TP 2 x PP 2 | within 1e-9 |
    integrations/megatron/test_sequence_parallel.py::test_cut_samples
  shared micro-batches on 3, 4 and 8 ranks | 9.2e-16 |
    integrations/megatron/test_shared.py::test_shared_micro_batches_give_the_gradients_of_plain_training
  Export after 0 steps is bit-equal to what came in.
    integrations/megatron/test_pretrained.py::test_logits_are_those_of_transformers_and_what_came_leaves
  reading it takes 82 to 102 MB more at the peak
    benchmarks/finetuning/test_finetuning.py::test_the_table_sets_a_peak_beside_the_share_of_its_rank
  hybrid models, Mamba by a recurrence in torch | within 1e-9 |
    integrations/megatron/unmodified/test_hybrid.py::test_random_plans_give_the_gradients_of_the_stock_loop
docs/mesh.md
  solved to 0.9 % of its own certified bound
    plugins/mesh/candidates/test_disjoint_groups.py::test_the_bound_of_a_micro_batch_holds_and_is_close
  1.86x over SP64, 1.25x over BatchAda
    benchmarks/published/test_published.py::test_flexsp_is_ordered_and_sp64_follows_its_formula
  1.12x over one degree a micro-batch
    benchmarks/planning/test_planning.py::test_every_mesh_is_above_its_bound_and_mixing_degrees_pays
  16 % over the certified bound
    plugins/mesh/test_bounds.py::test_neither_the_planner_nor_its_baselines_are_below_the_bound
  Planes of 2,048 ranks and more are planned as equal parts of 1,024 or more
    core/planning/test_parts.py::test_a_large_plane_is_planned_in_parts
  its steps were predicted with an error of 4.0 %
    commands/test_bench.py::test_predicted_steps_stand_beside_measured_ones
docs/support.md
  neither is exact, so the script runs without plans and evenload says why
    integrations/huggingface/test_families.py::test_a_family_is_planned_exactly_or_stays_as_it_is
  of all 189 families of causal language models
    integrations/huggingface/test_families.py::test_the_list_has_every_family
  0.16.1 and 0.19.2; exactness also on 0.17.1 and 0.18.2
    integrations/test_versions.py::test_extras_and_the_sets_that_are_tested_agree_with_what_is_supported
  "exact" is below 1e-9, as a test holds it.
    integrations/huggingface/test_units.py::test_units_change_ranks_and_gradients_and_figures_stay
  losses and norms against stock to 2e-6, of RLOO to 5e-4
    hosts/test_trl_layouts.py::test_a_trainer_of_trl_trains_the_same_in_a_layout
  | DPO | 90,064 -> 36,156 | 35,860 | 49.9 | 17.7 | 2.82x |
    hosts/test_benchmarks.py::test_pairs_are_equal_and_less_is_computed
  below 1e-9 in float64 for Qwen2.5-VL
    integrations/huggingface/test_pictures.py::test_rows_change_ranks_with_their_pictures_exactly
docs/packing.md
  among plans with cuts within 0.5 % of the fastest
    core/planning/test_judge.py::test_a_preference_is_worth_its_slack_and_no_more
  unless that shortens the step by 1 % (pipelines, ZeRO-3)
    plugins/packing/test_slicing.py::test_auto_cuts_where_that_makes_the_step_faster
  | 4 x 14 | 1.187 to 1.232 | 1.000 to 1.050 |
    benchmarks/planning/test_planning.py::test_padded_groups_are_over_their_bounds_and_near_the_best
  Every sample is trained exactly once.
    commands/test_train.py::test_every_sample_is_seen_once_over_changing_numbers_of_ranks
  1.14x and 1.09x the tokens/s of in-order packing
    commands/test_train.py::test_against_trains_each_variant_on_equal_batches
  gradients within 5e-15
    integrations/megatron/test_exactness.py::test_ranks_without_data_and_padded_plans_take_the_same_path
  gradients stay (float64, 1e-9): Transformers' Trainer
    integrations/huggingface/test_trainer.py::test_packs_are_filled_up_and_the_largest_runs_first
docs/plan.md
  ties within 0.1 %: the first in the table
    plugins/report/test_pictures.py::test_the_rival_is_the_fastest_but_stock_and_the_first_of_equals
docs/pipeline.md
  memory are those of the exact walk
    plugins/pipeline/test_checkpointing.py::test_rows_hold_what_the_walk_through_memory_finds
  the one for which a per cent more time saves most memory
    core/planning/test_judge.py::test_a_preference_is_worth_its_slack_and_no_more
  11 % to 17 % less time than fixed chunks
    benchmarks/planning/test_planning.py::test_chunks_of_equal_time_are_ahead_of_every_other_schedule
  | PP 8, 0.25 ms | 6.1 % (33) | 6.1 % (19) |
    benchmarks/peers/test_peers.py::test_no_schedule_is_ahead_at_the_memory_of_a_device
  Predicted to shorten a step by 4.6 % to 9.5 %
    benchmarks/peers/test_peers.py::test_two_stages_on_each_device_are_planned_at_equal_memory
  | stock | 5,834 | 1.53x
    training/test_pipelines.py::test_bench_has_a_bubble_and_peaks_of_every_stage
  `evenload verify` is exact on Megatron-Core 0.16.1 and 0.19.2
    integrations/megatron/test_v_shape.py::test_drawn_schedules_give_the_gradients_of_plain_training
docs/proof.md
  | 0 | exact |
    commands/test_verify.py::test_every_layout_is_exact
  | tokens | each run exactly once |
    commands/test_verify.py::test_planted_faults_are_caught
  However exact that step was, it says nothing about the plugin
    commands/test_verify.py::test_a_plugin_that_did_nothing_is_named_and_the_rest_is_exact
  every tenant of the recipe's folder, trained in company, with the same tenant trained alone
    commands/test_verify.py::test_tenants_are_exact_beside_each_alone
  in every second step about half of the batch's targets are masked:
    training/proof/test_masking.py::test_half_of_all_tokens_carry_no_loss_and_the_others_keep_their_labels
  | float32 | 2e-5 under Megatron-Core, 2e-6 under DeepSpeed, or the measured floor |
    training/proof/test_compare.py::test_a_gradient_is_judged_by_its_own_bound
docs/selection.md
  trains on what it would have trained on, on other ranks too
    plugins/data/test_learned_shares.py::test_a_killed_run_goes_on_with_the_shares_that_it_would_have_had
  gives every target a random weight, by sequence and by token
    training/proof/test_weighing.py::test_weights_have_every_sign_and_zeros_are_no_targets
  Under Megatron-Core in float64 the loss to 1e-12 and every gradient to 1e-9
    integrations/megatron/test_slices.py::test_random_plans_give_the_gradients_of_plain_training
  Under DeepSpeed in float32 every gradient to 2e-6
    integrations/deepspeed/test_slices.py::test_gradients_are_those_of_plain_training
  | Megatron-Core, float64, 1 rank | 7.7e-16, 1.8e-15, 9.3e-16 | 2.8e-4 |
    integrations/megatron/test_gradients.py::test_rows_are_those_of_one_backward_a_sample
  | DeepSpeed, float32, ZeRO 2 or 3 | 4.6e-7 |
    integrations/deepspeed/test_gradients.py::test_rows_are_those_of_one_backward_a_sample
  takes the same samples in the same order on 2 ranks, 1 rank, TP 2 and PP 2 of Megatron-Core in float64
    plugins/data/test_runs.py::test_less_selects_the_same_on_ranks_that_share_a_model
  take 3.8 times less CPU time than with PEFT and one sample a pass
    benchmarks/training/test_training.py::test_packs_and_single_passes_give_the_same_rows
docs/trees.md
  gives every row the loss and the gradients that it has alone
    commands/test_verify.py::test_completions_that_share_their_prompt_are_exact
  at any depth
    integrations/huggingface/test_trees.py::test_every_row_and_weight_gets_what_it_gets_without_trees
  where loss or gradients differ, or the model has dropout, rows are computed alone
    integrations/huggingface/test_trees.py::test_what_mixes_tokens_by_itself_keeps_its_rows_apart
  a target of the prompt counts as often as rows have it
    core/plan/test_trunks.py::test_a_pack_has_every_token_once_and_a_target_as_often_as_rows_have_it
  takes what is predicted to be faster
    core/planning/test_trees.py::test_each_sample_once_and_no_slower_than_rows_alone
  is 1.74x as fast as evenload on rows alone
    hosts/test_benchmarks.py::test_answers_of_a_prompt_are_equal_and_less_is_computed
benchmarks/results/hosts.md
  | trees over rows | 1.74x | | 1.36x | |
    hosts/test_benchmarks.py::test_answers_of_a_prompt_are_equal_and_less_is_computed
docs/switching_on.md
  A script that cannot be planned exactly trains as it would without evenload
    hosts/test_messages.py::test_a_script_that_nothing_is_exact_for_stays_as_it_is_and_says_so
  Losses and gradient norms after such a switch are those of the run that never stopped
    hosts/test_equal.py::test_evenload_is_switched_off_and_on_in_the_middle_of_an_epoch_as_if_never_stopped
  agree with the stock run to rounding: about 1e-7 in float32
    hosts/test_equal.py::test_every_step_is_equal
  within 15 s of the start
    hosts/test_messages.py::test_a_rank_without_evenload_is_named_and_not_waited_for
  The script has then trained exactly as without evenload.
    hosts/test_messages.py::test_a_script_that_nothing_is_exact_for_stays_as_it_is_and_says_so
benchmarks/results/data.md
  The last column is **predicted**: 1,024 ranks whose pauses are as these.
    benchmarks/training/test_training.py::test_many_ranks_pause_one_by_one_in_each_step_and_at_once_in_some
  Rows of the two differ by 7.0e-7 at the most
    benchmarks/training/test_training.py::test_packs_and_single_passes_give_the_same_rows
  | none: one order | 0.36 us |
    benchmarks/training/test_training.py::test_one_order_and_mixtures_of_many_have_a_row_each
  gradients 9.7e-15, loss 0, updates 6.7e-14
    training/test_mixture.py::test_a_killed_run_goes_on_with_the_same_draws_on_fewer_ranks
  **`odm` is better than default proportions, and not than uniform ones.**
    benchmarks/training/test_training.py::test_a_gain_within_the_spread_of_seeds_or_of_some_seeds_alone_is_none
benchmarks/results/exactness.md
  | `verify recipes/quickstart.yaml train.dtype=fp64` (DP 2) | 8.1e-16 | 0 |
    commands/test_verify.py::test_every_layout_is_exact
  | the same, slices: `plugins.packing.max_tokens=512` | 1.1e-15 | 0 |
    integrations/megatron/test_slices.py::test_random_plans_give_the_gradients_of_plain_training
  the largest error in float64 was 1.02e-15 at PP 2
    integrations/megatron/test_pipeline.py::test_drawn_schedules_give_the_gradients_of_plain_training
  DeepSpeed in float32 came to 5.0e-7
    integrations/deepspeed/pipeline/test_pipeline.py::test_stages_give_the_gradients_of_plain_training
  No family differs silently.
    integrations/huggingface/test_families.py::test_a_family_is_planned_exactly_or_stays_as_it_is
benchmarks/results/experts.md
  | GLM4.5-106B | expert | 100 % | 50.4 % | 92.2 (90.1) % | 106.4 (96.4) % |
    benchmarks/experts/test_experts.py::test_copies_and_tokens_that_go_once_to_a_node_are_ahead_of_even_routing
  packing has a speedup of 1.69x over stock
    commands/test_bench.py::test_a_step_is_predicted_as_uneven_as_experts_were_before
  Baselines are Python written after their descriptions
    plugins/moe/test_baselines.py::test_quotas_are_lawful_on_any_counts
  where at least 39 to 49 are needed
    benchmarks/experts/test_experts.py::test_no_planner_needs_fewer_copies_than_the_bound
  ## In training, measured
    benchmarks/experts/test_experts.py::test_the_table_has_a_row_a_variant_and_ratios_of_baselines_alone
  **Exact**: `pytest tests/integrations/megatron/test_experts.py -k go_once`
    integrations/megatron/test_experts.py::test_tokens_that_go_once_to_a_node
benchmarks/results/faults.md
  In 98 of 100 cases the exit code, the checkpoint of that step
    benchmarks/faults/test_faults.py::test_a_job_that_is_told_to_end_keeps_the_step_that_ran
  ## Drill
    benchmarks/faults/test_faults.py::test_jobs_that_fail_end_with_one_message_and_lose_nothing
  `make mutants`: every planted fault was noticed
    test_mutants.py::test_every_killer_runs_under_make_test
benchmarks/results/finetuning.md
  | stock | 8,355 | 1.149 | 53.7 % | 150 MiB | 2.43x |
    commands/test_bench.py::test_repeats_alternate_and_one_run_shows_what_disturbs_it
  validation against padded batches
    benchmarks/finetuning/test_finetuning.py::test_padded_batches_of_sorted_samples_hold_the_same_tokens_with_less_padding
  reading a folder
    benchmarks/finetuning/test_finetuning.py::test_every_rank_says_what_it_keeps
  saving in the background
    benchmarks/faults/test_checkpoints.py::test_every_row_is_a_time
benchmarks/results/generation.md
  **64 samples a step cost 2.4 and 3.0 times one**
    benchmarks/generation/test_generation.py::test_a_row_for_each_number_of_slots
  ## Exactness
    plugins/rollout/test_verify_generation.py::test_every_layout_generates_what_plain_generation_does
benchmarks/results/scoring.md
  ## What a pass costs
    benchmarks/sparse/test_sparse_scripts.py::test_a_row_for_each_variant_and_share_of_pairs
  ## What the loss is off by
    benchmarks/sparse/test_sparse_scripts.py::test_a_row_for_each_chooser_and_overlaps_of_the_same_weights_are_whole
benchmarks/results/gpu_rehearsed.md
  is a table that a test holds (`WAITS` in `tests/rehearsal/test_recipes.py`)
    rehearsal/test_recipes.py::test_a_recipe_runs_on_a_gpu
  5 % on both trainers (a test; 0.4 % on `recipes/slices.yaml`, small)
    rehearsal/test_memory.py::test_a_profile_predicts_what_the_allocator_holds
  Float64 gradients on Megatron-Core as in the trainers' own tests, with late streams
    rehearsal/test_exact.py::test_slices
benchmarks/results/hosts.md
  Each script is started by torchrun, stock and by `evenload run`
    hosts/test_benchmarks.py::test_a_script_of_a_checkout_is_run_stock_and_with_evenload
  python benchmarks/hosts/pairs.py --repeats 3
    hosts/test_benchmarks.py::test_pairs_are_equal_and_less_is_computed
  Losses and norms of SFT are printed as without evenload to the last digit
    programs/test_programs.py::test_losses_and_norms_are_stock_to_the_printed_digit
  | LLaMA-Factory 0.9.5 | 12,730 of 20,544 | 6.14 | 2.32 | 2.64x
    hosts/test_benchmarks.py::test_runs_of_a_program_are_one_row_and_a_failed_one_says_why
benchmarks/results/megatron_lm.md
  130 are planned (79 %), 148 run
    hosts/test_survey.py::test_the_table_counts_every_recipe_once
benchmarks/results/mesh.md
  ## Shared by 64 ranks, predicted
    benchmarks/peers/test_peers.py::test_mesh
benchmarks/results/packing.md
  Token lengths of 200,000 Wikipedia documents
    benchmarks/planning/test_planning.py::test_every_planner_is_measured_on_the_same_batches
benchmarks/results/pipelines.md
  | stock | 5,834 | 1.530x | 43.5 % | 118 | 7,634 | 1.544x | 42.5 % | 112 |
    training/test_pipelines.py::test_bench_has_a_bubble_and_peaks_of_every_stage
  Wikipedia's lengths, the longest 12,735
    benchmarks/test_scripts.py::test_samples_are_as_long_as_the_file_says
  No peer is ahead at the device's memory, nor at ZBV's bytes.
    benchmarks/peers/test_peers.py::test_no_schedule_is_ahead_at_the_memory_of_a_device
  ## Two stages on each device
    benchmarks/peers/test_peers.py::test_two_stages_on_each_device_are_planned_at_equal_memory
benchmarks/results/planning.md
  From 2,048 ranks on one part of 1,024 is planned, and all parts run its plan
    core/planning/test_parts.py::test_every_part_runs_the_plan_of_one
  ## No slower than a lawful row of its own table
    core/planning/test_judge.py::test_no_plan_is_slower_than_a_lawful_row_of_its_table
  1,922 are planned and lawful next to 14,567 lawful rows
    benchmarks/planning/test_planning.py::test_no_plan_is_slower_than_a_lawful_row_where_one_once_was
benchmarks/results/predictions.md
  | all | 52 | | 7.1 %, 24.3 % | |
    benchmarks/costs/test_costs.py::test_errors_are_those_of_the_steps
  the mean error is 0.5 % and the worst 4.8 %
    training/profiling/test_memory.py::test_real_trainers_hold_what_is_predicted
  The peaks of two tensor-parallel ranks with a profile of one are within 5 %
    integrations/megatron/test_sequence_parallel.py::test_the_peak_of_a_rank_is_what_was_predicted_of_it
  EP 1 0.4 % on average, 0.5 % at most; EP 2 1.0 %, 3.0 %
    training/profiling/test_memory.py::test_the_benchmark_starts_its_ranks_itself
  ## One sequence of 64K tokens
    benchmarks/memory/test_memory.py::test_slices_hold_a_fraction_at_equal_gradients
benchmarks/results/published.md
  Mesh is 1.86x over SP64
    benchmarks/published/test_published.py::test_flexsp_is_ordered_and_sp64_follows_its_formula
  | ChunkFlow, `chunkflow.py` | 7B 256K, over one sequence a micro-batch | 4.53x | 4.78x
    benchmarks/published/test_published.py::test_chunks_gain_over_one_sequence_a_micro_batch
  slices even micro-batches as well (1.02 to 1.11 over the mean; paper 1.05)
    benchmarks/published/test_published.py::test_wlb_llm_evens_micro_batches
  | ByteScale, `bytescale.py` | GitHub-like, 2048K, over static rings | up to 7.89x | 10.24x |
    benchmarks/published/test_published.py::test_bytescale_balances_what_naive_degrees_leave
  | InfiniPipe, `infinipipe.py` | 13B 48K, over FlexSP | 1.52x | 1.20x |
    benchmarks/published/test_published.py::test_infinipipe_has_every_system_and_is_ordered
  | UltraEP, `ultraep.py` | GLM4.5, one rack, of even routing | 96.4 % | 97.5 % |
    benchmarks/published/test_published.py::test_ultraep_is_reached_in_a_rack_and_static_beaten_between_nodes
  stand-ins that meet the published fractions
    benchmarks/published/test_published.py::test_stand_ins_meet_the_published_fractions
benchmarks/results/rollouts.md
  | reasoning 256 x 16 | 808, 0.28 | 659, 1.18x, 0.11 |
    benchmarks/rollouts/test_rollouts.py::test_spreading_gains_over_groups_and_moving_more
  **The paper's means are not reached but where quality may fall to 80 %**
    benchmarks/rollouts/test_rollouts.py::test_a_cascade_is_planned_as_published_and_never_serves_less_than_one_model
  **3 % over the bound is not reached**
    plugins/rollout/test_plan.py::test_no_rollout_ends_before_its_bound
benchmarks/results/search.md
  Floors hold: of 1,500 drawn settings 1,370 were planned
    core/planning/test_floors.py::test_no_plan_of_a_drawn_setting_is_below_its_floor
  python benchmarks/planning/search_measured.py --rounds 2 --steps 3
    benchmarks/planning/test_planning.py::test_every_setting_of_the_measured_search_is_a_recipe
benchmarks/results/standing.md
  | evenload packing | 1.0030 | 1.0003 | 1.0000 | plugins/packing |
    benchmarks/planning/test_standing.py::test_what_a_row_claims_comes_out_again
benchmarks/results/tenants.md
  | DP 2 | 4 | 25,957 | 19,625 | 1.36x (1.25 to 1.42) | 1.33x | 5e-9 |
    benchmarks/lora/test_lora.py::test_tenants_together_lose_what_each_loses_alone
  | one job | 26,813 | 878 MiB | 4.2 s |
    benchmarks/lora/test_lora.py::test_a_job_each_takes_a_base_each
  | 16 | 254 ms | 1.29x (1.26 to 1.31) | 1.34x (1.29 to 1.37) |
    benchmarks/lora/test_lora.py::test_adapters_are_timed_over_the_bare_base
  | halving | importlib.lr=0.003.r=16 | 6.5612 | 240 |
    benchmarks/lora/test_lora.py::test_a_sweep_trains_less_than_all_of_its_trials
""")

WITHOUT_A_TEST = (
    ("docs/costs.md", "Rounds themselves cost up to 4 %"),
    ("docs/costs.md", "of 64 micro-batches each in about a second"),
    ("docs/data.md", "written into the cache once (3.4 s on a CPU core)"),
    ("docs/data.md", "0.5 ms for 512 of 100 million samples"),
    ("docs/faults.md", "0.07 % of a step of 0.4 s"),
    ("docs/selection.md", "`odm` 0.03 ms a step"),
    ("benchmarks/results/faults.md", "watching: marks, heartbeats, the guard"),
    ("benchmarks/results/faults.md", "`benchmarks/faults/same_files.py` | 1.4 ms and 6.8 ms"),
    ("benchmarks/results/faults.md", "the last step ended 0.2 and 0.3 s after the limit"),
    ("benchmarks/results/packing.md", "faster in all seven turns of two runs, 2.4 to 6.4 times."),
    ("benchmarks/results/pipelines.md", "| 6, 2,048 | 4, 2 (auto) | 0.58 | **0.868** |"),
    ("benchmarks/results/planning.md", "| 1,024 | 65,536 | 10.8 and 13 |"),
    ("benchmarks/results/search.md", "| 64 ranks, 512 sequences | 1,128 | 88 |"),
)
"""Figures of a machine and a day whose script, or whose stopwatch, no test runs."""

NONE_OF_OURS = {
    "docs/architecture.md": "says in which folder tests of exactness belong",
    "docs/results.md": "a list of the pages of benchmarks, which have the figures",
    "docs/index.md": "a list of pages, which have the claims",
    "docs/log.md": "what was tried and dropped: nothing of it is in the product",
    "docs/reference_recipe.md": "written from the schema: its figures are defaults and definitions",
}
"""Pages that the search for figures and "exact" finds and that state none of ours, with the reason."""
