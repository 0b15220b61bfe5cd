# ruff: noqa: INP001 - beside a script, not a package
"""The kinds of faults that users of KV-cache systems reported, and the tests that try each kind here."""

from typing import NamedTuple

__all__ = ["PROBES", "ROWS", "Row"]

ALTERED = "tests/faults/test_nvme_altered_index.py::"
BEHAVIOUR = "tests/unit/nvme/test_nvme_behaviour.py::"
CONNECTOR = "tests/unit/connector/test_scheduler_half.py::"
DISK = "tests/faults/test_fault_disk.py::"
ENGINE = "tests/faults/test_fault_engine.py::"
FAULTS = "tests/faults/test_fault_injection.py::"
LOADS = "tests/faults/test_connector_engine.py::"
NAMES = "tests/faults/test_fault_names.py::"
NVME_DISK = "tests/faults/test_nvme_disk_faults.py::"
OPENING = "tests/unit/nvme/test_nvme_opening.py::"
PARTS = "tests/faults/test_fault_parts.py::"
PRESENCE = "tests/faults/test_fault_presence.py::"
RECENCY = "tests/unit/nvme/test_nvme_recency.py::TestHints::"
REMOVALS = "tests/faults/test_store_removals.py::"
SCHEDULER = "tests/unit/engine/test_scheduler.py::"
SEMANTICS = "tests/unit/store/test_store_semantics.py::"

EVENTS = "tests/unit/events/test_event_stream.py::"
FOLD = "tests/property/test_event_fold.py::"
MIRROR = "tests/unit/events/test_mirror.py::"
TENANTS = "tests/unit/service/test_cache_tenants.py::"


class Row(NamedTuple):
    """One kind of fault.

    kind: what users saw. tests: pytest node ids without parameters; empty where there is nothing to try yet, and
    `missing` says why (with tests: what of the kind is not tried). probe: key of `PROBES`, "" where nobody probed it.
    """

    kind: str
    tests: tuple[str, ...] = ()
    missing: str = ""
    probe: str = ""


PROBES = {
    "flip": "served silently",
    "truncate": "served as a hit, the tail from another request's buffer (its server mode detects it)",
    "delete": "internal KeyError escapes; a miss in a batch",
    "names": "models `a/b` and `a-b` share files: wrong data served",
    "vanish": "key in flight for ever, bytes stay charged, retries refused",
    "remove": "capacity stays charged: all later puts refused until restart",
    "restart": "index empty, files stay on disk, usage counts 0",
    "staging": "partial result, and the disk tier's lock stays held: the tier is dead",
    "long name": "assertion error on look-up",
    "shape": "look-ups hit, every retrieve fails with a size mismatch",
    "visible": "0 of 16 chunks found right after the store was reported done, in about half of the requests",
    "concurrent": "correct (serialised)",
}
"""What LMCache 0.5.6 did, CPU only, small scripts: only what was probed."""

ROWS = (
    # ---- presence, eviction, accounting
    Row(
        "existence probes renew leases: eviction finds no victim, all puts fail",
        (PRESENCE + "test_probes_keep_nothing_alive",),
    ),
    Row(
        "after the metadata server restarts, nodes cannot join or find old blocks",
        (DISK + "test_the_index_reopened_under_load_keeps_old_blocks",),
        "the index is a file: there is no server to restart",
    ),
    Row("disk eviction leaves ghost entries", (PRESENCE + "test_what_was_evicted_below_is_a_clean_miss",)),
    Row(
        "writes lost under pressure are never retried, and not counted",
        (
            PRESENCE + "test_after_a_burst_the_accepted_share_is_what_the_counters_claim",
            "tests/unit/store/test_placement.py::test_what_the_queue_dropped_is_written_when_it_is_used_again",
        ),
    ),
    Row(
        "garbled output, no end-to-end checksum",
        (
            PRESENCE + "test_a_flipped_bit_in_any_tier_is_a_miss_and_counted",
            DISK + "test_any_byte_flipped_anywhere_is_a_miss_or_another_start",
        ),
        probe="flip",
    ),
    Row(
        "keys not scoped: one tenant overwrites or removes another's blocks",
        (
            NAMES + "test_the_same_text_of_somebody_else_is_found_by_no_verb",
            TENANTS + "test_the_same_keys_of_two_tenants_are_different_blocks",
            TENANTS + "test_a_tenant_that_fills_its_quota_evicts_its_own_blocks_only",
        ),
        probe="names",
    ),
    Row(
        "KV restored without its matching parts",
        (
            PARTS + "test_a_block_without_one_of_its_parts_is_a_miss",
            PARTS + "test_a_part_that_fails_on_the_way_up_takes_its_block_with_it",
        ),
    ),
    Row(
        "reported hit length was never fetched",
        (FAULTS + "test_no_room_in_host_is_not_told_as_absence", CONNECTOR + "test_a_load_reports_what_is_good"),
    ),
    Row(
        "full hit shortened for lack of memory looks like a partial hit",
        (FAULTS + "test_no_room_in_host_is_not_told_as_absence",),
        probe="staging",
    ),
    Row(
        "failed transfer counted as loaded",
        (
            FAULTS + "test_below_fails_on_the_way_up",
            FAULTS + "test_below_fails_on_the_way_down",
            FAULTS + "test_host_fails_on_the_way_up",
            FAULTS + "test_host_fails_on_the_way_down",
            LOADS + "test_a_worker_that_raises_leaves_no_request_loading",
        ),
    ),
    Row(
        "loading is slower than recomputing, and nothing notices",
        ("tests/unit/connector/test_connector_gate.py::test_a_throttled_tier_flips_the_choice_and_says_so",),
    ),
    Row(
        "removals never reduce the size counter; later puts are dropped",
        (PRESENCE + "test_every_counter_is_zero_after_a_storm_and_a_clear",),
        probe="remove",
    ),
    Row(
        "pins of aborted requests are never released",
        (
            PRESENCE + "test_thousands_of_abandoned_look_ups_leave_no_lease",
            "tests/faults/test_connector_lifecycles.py::test_random_lives_leave_nothing_behind",
        ),
    ),
    Row(
        "allocator spins when the pool is full and nothing is evictable",
        (FAULTS + "test_a_pool_smaller_than_one_request_fails_fast",),
    ),
    Row(
        "look-up says hit, retrieve returns nothing, until redeployed",
        (
            PRESENCE + "test_a_segment_that_lost_its_end_is_a_miss_once_and_written_again",
            PRESENCE + "test_blocks_dropped_by_others_are_a_clean_miss_at_every_moment",
        ),
        probe="delete",
    ),
    Row(
        "one look-up per chunk in the scheduler's path",
        (PRESENCE + "test_a_look_up_of_a_thousand_blocks_is_a_handful_of_calls",),
    ),
    Row(
        "stale handles under concurrent load kill the engine",
        (
            FAULTS + "test_many_threads_in_every_order",
            FAULTS + "test_a_handle_cannot_be_used_after_its_end",
            ENGINE + "test_eight_clients_on_small_pools_with_every_fault_at_random",
        ),
    ),
    Row(
        "lost, incomplete or resurrecting events",
        (
            EVENTS + "test_a_slow_subscriber_loses_messages_sees_it_and_ends_up_right",
            EVENTS + "test_another_publisher_at_the_same_place_is_noticed",
            FOLD + "test_what_nvme_tells_adds_up",
        ),
    ),
    Row(
        "blocks that were deleted or cleared come back",
        (
            SEMANTICS + "test_what_is_deleted_on_its_way_down_does_not_come_back",
            SEMANTICS + "test_what_is_deleted_on_its_way_up_does_not_come_back",
            SEMANTICS + "test_who_joined_a_load_of_blocks_that_are_deleted_does_not_bring_them_back",
            SEMANTICS + "test_a_lease_does_not_bring_back_what_was_deleted",
            REMOVALS + "test_a_use_in_the_midst_of_a_removal_does_not_bring_blocks_back",
            REMOVALS + "test_what_was_being_leased_does_not_come_back",
            REMOVALS + "test_what_its_only_writer_removed_is_nowhere_whatever_others_do",
        ),
    ),
    Row(
        "a removal is reported done by a store of which one tier keeps the blocks",
        (
            REMOVALS + "test_a_tier_that_keeps_blocks_is_named_and_the_others_have_none",
            REMOVALS + "test_what_is_still_being_written_is_not_gone",
            REMOVALS + "test_a_tier_with_a_defect_has_not_cleared",
        ),
    ),
    Row(
        "a time to live, or a hint, takes a prefix away from under what builds on it",
        (
            RECENCY + "test_a_ttl_that_is_given_later_prolongs_and_never_shortens",
            RECENCY + "test_a_child_without_ttl_keeps_its_parent",
            RECENCY + "test_nothing_goes_before_what_builds_on_it_whatever_hints_say",
            "tests/unit/nvme/test_nvme_priorities.py::test_nothing_goes_before_what_builds_on_it",
        ),
    ),
    Row("back-pressure is invisible", (FAULTS + "test_writers_on_a_slow_disk_fill_a_bounded_queue",)),
    # ---- loads and the engine
    Row(
        "one damaged file makes a request loop for ever",
        (
            ENGINE + "test_a_damaged_block_is_a_miss_once_and_does_not_loop",
            PRESENCE + "test_a_segment_that_lost_its_end_is_a_miss_once_and_written_again",
        ),
        probe="truncate",
    ),
    Row(
        "hit length known only after the bytes arrived", (PRESENCE + "test_the_length_is_known_before_any_byte_moves",)
    ),
    Row(
        "parked loads hold blocks, the queue's head does not fit: idle for ever",
        (SCHEDULER + "test_parked_loads_and_a_head_that_does_not_fit_make_progress",),
    ),
    Row(
        "abort with a load and a save pending frees twice",
        (
            CONNECTOR + "test_abort_with_load_and_save_pending_frees_once",
            LOADS + "test_abort_at_any_step_of_a_load_frees_everything_once",
            SCHEDULER + "test_abort_in_every_state_frees_everything_once",
        ),
    ),
    Row(
        "abort of a request that was never scheduled kills the engine",
        (LOADS + "test_abort_before_a_request_was_ever_scheduled", CONNECTOR + "test_unknown_ids_are_tolerated"),
    ),
    Row(
        "block copied before it was completely computed",
        (
            CONNECTOR + "test_blocks_under_copy_are_fenced",
            "tests/property/test_scheduler_machine.py::TestSchedulerMachine",
        ),
    ),
    Row(
        "assertion after hours, once eviction begins",
        (
            PRESENCE + "test_a_soak_over_a_tier_smaller_than_the_working_set",
            "tests/faults/test_store_soak.py::test_random_verbs_from_several_threads_leave_nothing_behind",
        ),
    ),
    Row(
        "sharers of a failed block decode before it is recomputed",
        (
            ENGINE + "test_sharers_of_a_failed_prefix_decode_what_the_first_recomputes",
            LOADS + "test_sharers_of_failed_blocks_get_the_right_tokens",
        ),
    ),
    Row(
        "recovery from a failed load breaks when results come a step late",
        ("tests/property/test_scheduler_machine.py::TestSchedulerMachine",),
    ),
    Row(
        "recompute after a failed load does not wake an idle engine",
        (LOADS + "test_a_failing_load_of_the_only_request_wakes_the_engine",),
    ),
    Row(
        "persistent cache not separated by layout",
        (
            NAMES + "test_the_same_text_of_somebody_else_is_found_by_no_verb",
            ENGINE + "test_another_block_size_or_dtype_finds_nothing",
        ),
        probe="shape",
    ),
    Row(
        "another tensor-parallel size reads other heads",
        (
            NAMES + "test_shards_and_groups_of_one_layout_have_keys_of_their_own",
            "tests/unit/connector/test_shards.py::test_every_shard_gets_its_own_parts_back",
        ),
    ),
    Row(
        "wrong result when a prompt is an exact multiple of a block",
        (LOADS + "test_every_length_around_a_block_edge_is_loaded_but_for_its_last_token",),
    ),
    Row(
        "cache kept though weights changed, or wiped though they did not",
        (NAMES + "test_the_same_text_of_somebody_else_is_found_by_no_verb",),
    ),
    Row(
        "only the first chunk of a chunked prefill was stored",
        (
            ENGINE + "test_any_split_of_a_prefill_stores_every_block",
            LOADS + "test_any_split_of_a_prefill_stores_the_same_blocks",
        ),
    ),
    Row(
        "events name blocks that cannot be loaded, or whose parents are unknown",
        (
            MIRROR + "test_changes_and_snapshots_add_up_to_what_is_held",
            MIRROR + "test_a_snapshot_has_parents_first_whatever_the_order_of_arrival",
            FOLD + "test_a_damaged_block_is_told_as_damaged",
        ),
    ),
    Row(
        "statistics looked up by another name than they are kept by",
        (NAMES + "test_counters_are_kept_by_the_name_that_a_tier_was_given",),
    ),
    Row("disk tier grows without limit", (PRESENCE + "test_the_disk_never_has_more_than_its_budget_over_restarts",)),
    Row("wanted: offload only what is preempted", missing="no such write rule; `leave` writes what leaves host"),
    Row(
        "loads of several requests with one prefix fail",
        (PRESENCE + "test_many_readers_of_one_prefix_cost_one_load", LOADS + "test_many_equal_requests_make_one_load"),
        probe="concurrent",
    ),
    # ---- what users of one system reported
    Row(
        "sessions that return from disk get KV of others",
        (PRESENCE + "test_sessions_that_come_back_from_disk_get_their_own_blocks",),
    ),
    Row(
        "a block that is being written is read",
        (PRESENCE + "test_a_reader_sees_a_block_that_is_being_written_not_at_all_or_whole",),
    ),
    Row(
        "engine changes its page layout, the cache restores wrong bytes",
        (NAMES + "test_the_same_text_of_somebody_else_is_found_by_no_verb",),
        probe="shape",
    ),
    Row(
        "text degrades with eight concurrent clients",
        (ENGINE + "test_eight_clients_on_small_pools_with_every_fault_at_random",),
    ),
    Row("image identities collide", ("tests/unit/ground/test_keys.py::test_five_thousand_images_do_not_collide",)),
    Row(
        "tenant salt dropped on some path",
        (
            NAMES + "test_the_same_text_of_somebody_else_is_found_by_no_verb",
            ENGINE + "test_tenants_on_one_store_share_nothing",
        ),
    ),
    Row(
        "hybrid models: hit reported without the state of every group",
        (
            PARTS + "test_a_block_without_one_of_its_parts_is_a_miss",
            "tests/unit/connector/test_shards.py::test_a_block_without_one_of_its_parts_is_a_miss",
        ),
    ),
    Row(
        "accuracy falls on the second pass with a lossy format",
        (
            "tests/unit/formats/test_quantized_formats.py::test_errors_on_gaussian_rows_are_those_of_the_theory",
            "tests/unit/connector/test_lossy_end_to_end.py::test_only_those_who_opt_in_get_lossy_kv",
            "tests/unit/store/test_recoding.py::test_a_lossless_format_below_comes_back_raw_bit_by_bit",
        ),
    ),
    Row(
        "hashes differ between processes",
        (
            "tests/unit/ground/test_keys.py::test_names_are_the_same_in_every_process",
            "tests/unit/doctor/test_doctor_checks.py::test_names_that_depend_on_the_process",
        ),
    ),
    Row(
        "no sharing across tensor-parallel sizes",
        (NAMES + "test_the_same_text_of_somebody_else_is_found_by_no_verb",),
        "documented: a clean miss",
    ),
    Row(
        "chunked prefill stores fewer chunks than the prompt has",
        (ENGINE + "test_any_split_of_a_prefill_stores_every_block",),
    ),
    Row(
        "disk tier useless after a restart",
        (
            "tests/faults/test_nvme_kill.py::test_killed_writers_leave_no_wrong_byte_and_leak_nothing",
            DISK + "test_a_directory_of_another_run_is_found_again_and_counted",
        ),
        probe="restart",
    ),
    Row(
        "disk grows past its limit: files of earlier runs are not counted",
        (
            OPENING + "TestAnotherCapacity::test_smaller_converges_below_it",
            PRESENCE + "test_the_disk_never_has_more_than_its_budget_over_restarts",
        ),
        probe="restart",
    ),
    Row("the limit is per worker", (DISK + "test_processes_on_one_directory_share_one_budget_and_their_blocks",)),
    Row("bundled server never evicts", (TENANTS + "test_a_tenant_that_fills_its_quota_evicts_its_own_blocks_only",)),
    Row(
        "pins or references leak on error paths",
        (
            FAULTS + "test_after_a_storm_of_faults_everything_can_be_allocated_again",
            FAULTS + "test_an_abort_whose_answer_is_lost_leaks_nothing",
        ),
    ),
    Row(
        "no space although there is plenty (fragmentation)",
        (
            PRESENCE + "test_a_soak_over_a_tier_smaller_than_the_working_set",
            "tests/unit/cpu/test_slab.py::test_random_sizes_leave_no_overlap_and_no_fragmentation",
        ),
    ),
    Row(
        "restart of the remote server hangs requests",
        ("tests/faults/test_valkey_faults.py::TestValkeyFaults",),
    ),
    Row("negative need to load loops for ever", (CONNECTOR + "test_a_match_that_the_device_covers_is_given_up",)),
    Row(
        "objects without an allocator: some order of verbs leaks", (FAULTS + "test_verbs_in_every_order_leak_nothing",)
    ),
    Row(
        "MLA, FP8 or mixed head dims crash",
        (
            NAMES + "test_layer_groups_of_every_shape_go_through_every_tier",
            "tests/unit/store/test_recoding.py::test_parts_of_several_groups_are_encoded_each_in_its_shape",
        ),
    ),
    Row(
        "eviction gets slow as the tier grows; loading collapses when memory is full",
        (PRESENCE + "test_the_work_of_an_eviction_does_not_grow_with_the_tier",),
        "times: see the benchmarks",
    ),
    Row(
        "users lose days to configuration traps",
        (
            "tests/unit/doctor/test_doctor_checks.py::test_capacities",
            "tests/unit/doctor/test_doctor_checks.py::test_limits",
            "tests/unit/doctor/test_doctor_checks.py::test_file_systems",
        ),
    ),
    # ---- neighbours
    Row(
        "a tier does not answer",
        (
            "tests/faults/test_store_hangs.py::test_a_hanging_load_is_a_miss_at_its_deadline_and_leaks_nothing",
            "tests/faults/test_store_hangs.py::test_close_does_not_wait_for_a_tier_that_hangs",
            ENGINE + "test_a_disk_that_does_not_answer_does_not_stop_the_engine",
        ),
    ),
    Row(
        "the file system is full",
        (
            DISK + "test_a_full_file_system_refuses_blocks_and_nothing_else",
            DISK + "test_a_file_size_limit_refuses_blocks_and_nothing_else",
            DISK + "test_a_full_disk_kills_nobody_who_opens_a_directory",
            DISK + "test_a_disk_that_fills_kills_no_reader",
        ),
    ),
    Row("the device has a bad page", (DISK + "test_one_bad_page_costs_one_block_and_its_descendants",)),
    Row(
        "an entry of the index is altered: a store that believes it serves other bytes, or gives up all the rest",
        (
            ALTERED + "test_an_altered_record_is_one_miss_and_counted",
            ALTERED + "test_an_altered_record_is_repaired",
            ALTERED + "test_an_altered_key_costs_one_block",
            ALTERED + "test_a_damaged_page_costs_what_lies_on_it",
            ALTERED + "test_no_other_altered_entry_costs_a_block",
            ALTERED + "test_a_namespace_that_nothing_names_is_lost_and_no_other",
            ALTERED + "test_eviction_goes_on_where_a_record_was_altered",
            ALTERED + "test_what_was_altered_beside_the_records_refuses_until_it_is_opened_again",
        ),
    ),
    Row(
        "the index on disk is damaged: a store that believes its pages dies with the process",
        (
            "tests/unit/nvme/test_nvme_pages.py::test_whatever_happens_to_pages_kills_nobody",
            "tests/unit/nvme/test_nvme_pages.py::test_truncated_at_every_page",
            "tests/unit/nvme/test_nvme_pages.py::test_what_is_whole_is_found_and_nothing_that_was_deleted",
            "tests/unit/nvme/test_nvme_pages.py::test_an_altered_list_of_free_pages_costs_one_page_at_most",
            "tests/unit/nvme/test_nvme_rebuilding.py::test_records_that_share_pages_are_not_kept",
            OPENING + "TestDamagedIndex",
        ),
    ),
    Row(
        "a process is killed while it opens, rebuilds or compacts a directory",
        (
            "tests/faults/test_nvme_killed_opening.py::test_killed_at_every_change",
            "tests/faults/test_nvme_killed_opening.py::test_who_looks_keeps_nobody_from_what_was_rebuilt",
        ),
    ),
    Row(
        "a process that dies in the midst of a look-up makes the index grow for ever",
        (NVME_DISK + "test_a_process_that_dies_in_the_midst_of_a_look_up_does_not_make_the_index_grow",),
    ),
    Row(
        "after a power loss commits that were acknowledged are missing, or blocks stay that nothing evicts",
        (
            OPENING + "TestAfterTheMachineStopped",
            BEHAVIOUR + "test_durable_syncs_bytes_before_the_index_names_them",
            BEHAVIOUR + "test_durable_commits_wait_for_the_page_that_makes_them_count",
            NVME_DISK + "test_a_failing_sync_drops_the_commit_and_keeps_the_rest",
            NVME_DISK + "test_who_finds_nothing_to_synchronise_waits_for_who_is_at_it",
        ),
        "a power loss is played by another boot id and files that were not written back",
    ),
    Row(
        "a forked child waits for threads that it does not have, or damages what its parent holds",
        (
            OPENING + "test_a_forked_child_gets_an_error_and_harms_nobody",
            NVME_DISK + "test_a_child_of_fork_keeps_no_lock_alive",
            "tests/faults/test_store_faults.py::test_a_child_of_fork_waits_for_nobody",
            "tests/unit/nvme/test_nvme_index.py::test_no_use_across_a_fork",
        ),
    ),
    Row("the directory becomes read-only", (DISK + "test_a_directory_that_became_read_only_is_refused_in_one_line",)),
    Row(
        "the directory vanishes",
        (DISK + "test_a_directory_that_vanishes_is_a_miss_and_can_be_made_anew",),
        probe="vanish",
    ),
    Row("host memory fails at every call", (ENGINE + "test_a_host_that_always_fails_only_costs_time",)),
    Row("long model names", (NAMES + "test_the_same_text_of_somebody_else_is_found_by_no_verb",), probe="long name"),
    Row(
        "a store that is reported done is not visible yet",
        (PRESENCE + "test_a_put_that_is_reported_is_visible",),
        probe="visible",
    ),
    Row(
        "is this tier usable, and faster than computing again?",
        (
            "tests/unit/doctor/test_doctor_checks.py::test_a_tier_is_faster_or_slower_than_computing_again",
            "tests/unit/doctor/test_doctor_checks.py::test_a_tier_that_fails_its_sample",
        ),
    ),
)
