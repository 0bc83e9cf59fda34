"""Inputs that broke systems of this kind, and the tests that show what Reef does with them.

Each case has a number, is said in one line, and names its tests. A case is shown from outside: at least one of its tests runs
a real `reef serve`. Who renames or removes a test finds out here which case lost it.
"""

import ast
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parent
OUTSIDE = "tests.e2e.server"
"""Whoever starts a server does it with this module."""

CASES: dict[int, tuple[str, str]] = {
    # Bodies, headers, errors
    1: ("a body that is no object", "e2e/test_bodies.py: what_is_no_object_reaches_nobody controls_take_objects_only"),
    2: ("cut-off JSON, and the connection after it", "e2e/test_bodies.py: a_cut_off_body_leaves_its_connection_usable"),
    3: ("scores that are no finite numbers", "e2e/test_bodies.py: scores_are_finite"),
    4: ("a score that is a string", "e2e/test_bodies.py: wrong_feedback_is_named_and_not_stored"),
    5: ("feedback that is a list", "e2e/test_bodies.py: wrong_feedback_is_named_and_not_stored"),
    6: (
        "a scenario that is missing or blank",
        "e2e/test_feedback.py: a_blank_scenario_is_refused a_mandatory_header_and_no_scenario_by_mistake",
    ),
    7: ("what a provider refuses", "e2e/test_bodies.py: a_providers_refusal_keeps_its_words"),
    8: ("a conversation of 3 MiB", "e2e/test_bodies.py: a_large_conversation_goes_through_whole"),
    9: ("an import of more than 1 MiB", "e2e/test_bodies.py: imports_are_limited"),
    # Authentication
    10: ("the scheme in any case", "e2e/test_tokens.py: the_scheme_has_no_case_and_the_token_has"),
    11: ("the token in another case", "e2e/test_tokens.py: the_scheme_has_no_case_and_the_token_has"),
    12: ("malformed authorization", "e2e/test_tokens.py: the_scheme_has_no_case_and_the_token_has"),
    13: ("a token in the query, on every route", "e2e/test_tokens.py: a_token_in_the_query_is_no_token"),
    14: ("a token variable that is unset or empty", "e2e/test_tokens.py: an_unset_token_variable_refuses_the_start"),
    # Idempotency, references, consumption
    15: (
        "the same report again",
        "e2e/test_feedback.py: the_same_report_is_stored_once_and_another_under_its_id_is_a_conflict",
    ),
    16: (
        "another report under its id",
        "e2e/test_feedback.py: the_same_report_is_stored_once_and_another_under_its_id_is_a_conflict",
    ),
    17: (
        "either, after training, eviction and a restart",
        "e2e/test_learning.py: a_restart_keeps_everything what_was_trained_and_evicted_is_known_for_ever; "
        "e2e/test_feedback.py: conflicts_are_known_after_a_restart",
    ),
    18: ("a reference nobody knows", "e2e/test_feedback.py: what_cannot_be_cited_is_named_and_nothing_stored"),
    19: ("another scenario's receipt", "e2e/test_feedback.py: what_cannot_be_cited_is_named_and_nothing_stored"),
    20: ("a report or a receipt twice as reference", "e2e/test_feedback.py: what_cannot_be_cited_is_named_and_nothing_stored"),
    21: ("a late report about what was trained", "e2e/test_learning.py: a_record_never_trains_twice"),
    22: (
        "one report about three turns",
        "e2e/test_recipes.py: a_report_about_several_turns_is_one_trajectory a_report_about_a_chat_is_one_trajectory; "
        "e2e/test_steps.py: a_report_about_a_conversation_reaches_the_proposer_whole; "
        "e2e/test_feedback.py: one_report_about_a_conversation_keeps_its_order",
    ),
    23: ("a batch with one bad record", "e2e/test_feedback.py: a_batch_is_stored_whole_or_not_at_all"),
    # Streaming
    24: (
        "where the receipt's frame stands",
        "e2e/test_streams.py: the_receipt_stands_between_the_last_chunk_and_done "
        "a_receipt_can_be_read_and_cited_when_its_frame_arrives",
    ),
    25: (
        "a stream without its end",
        "e2e/test_streams.py: a_stream_without_an_end_gives_no_receipt_and_never_trains; "
        "e2e/test_steps.py: an_answer_that_broke_off_never_teaches; e2e/test_learning.py: eligibility_is_answered_with_reasons",
    ),
    26: ("an Anthropic stream", "e2e/test_streams.py: the_stream_of_an_anthropic_provider_gains_the_receipt_alone"),
    27: ("fields nobody here knows", "e2e/test_streams.py: sampling_fields_reach_the_provider_verbatim"),
    # Scenarios and releases
    28: (
        "a mistyped scenario",
        "e2e/test_releases.py: a_mistyped_scenario_is_in_sight; "
        "e2e/test_feedback.py: a_mandatory_header_and_no_scenario_by_mistake",
    ),
    29: ("an instruction to a scenario nobody knows", "e2e/test_feedback.py: an_instruction_makes_no_scenario"),
    30: (
        "what a rollback keeps",
        "e2e/test_releases.py: a_rollback_is_a_release_of_its_own_and_the_chain_keeps_all "
        "rollbacks_at_the_same_time_lose_no_release",
    ),
    31: (
        "what waits for a person",
        "e2e/test_releases.py: what_waits_for_a_person_is_served_by_nobody; "
        "supervisor/test_evolution.py: a_model_proposes_coding_tasks_judge_and_a_person_promotes",
    ),
    32: ("deleting under a job", "e2e/test_learning.py: a_scenario_is_not_archived_under_its_job"),
    33: (
        "the order of catalogues",
        "e2e/test_releases.py: a_rollback_is_a_release_of_its_own_and_the_chain_keeps_all",
    ),
    # Non-blocking and status
    34: (
        "reads during a step",
        "e2e/test_steps.py: nobody_waits_for_a_step; e2e/test_learning.py: "
        "reads_do_not_wait_for_a_trainer_that_stands_still "
        "reports_become_a_release_that_serves_and_a_rollback_restores_the_tokens",
    ),
    35: ("how each end is called", "e2e/test_steps.py: every_end_has_its_name_reason_and_times"),
    36: ("a stop with work in the queue", "e2e/test_learning.py: queued_reports_survive_a_stop"),
    37: ("instructions that must not be", "e2e/test_feedback.py: instructions_are_screened_and_never_echoed"),
    # Restart and crash
    38: (
        "kill -9 between a push and its commit",
        "crash/test_push_kills.py: a_push_is_cut_off a_publication_is_cut_off; "
        "crash/test_kill.py: the_server_is_killed the_server_is_killed_between_the_chain_and_the_ledger",
    ),
    39: ("what a killed server left", "e2e/test_learning.py: after_kill_9_nobody_is_fooled_by_what_the_old_server_left"),
    40: (
        "an engine that stops answering a push",
        "e2e/test_several_engines.py: an_engine_that_stops_answering_a_push_is_named_and_the_other_serves_on",
    ),
    41: (
        "a push longer than the watchdog",
        "crash/test_long_push.py: a_push_longer_than_the_watchdog_costs_no_engine_and_no_request",
    ),
    # Harness install and evaluation
    42: ("a provider that wants no key", "e2e/test_steps.py: a_provider_that_wants_no_key_gets_episodes_too"),
    43: ("the wrapper from any shell", "e2e/test_installed.py: the_wrapper_works_from_any_shell"),
    44: (
        "what an install touches",
        "e2e/test_installed.py: an_install_touches_its_own_folders_only_and_the_second_nothing",
    ),
    45: ("files that leave their folder", "e2e/test_installed.py: no_file_leaves_its_folder"),
    46: (
        "what a release needs",
        "e2e/test_installed.py: what_a_release_needs_is_asked_for_before_anything_is_written",
    ),
    47: (
        "sessions and reports at once",
        "e2e/test_installed.py: sessions_and_reports_side_by_side a_reporter_that_was_killed_leaves_its_run_to_the_next",
    ),
    48: ("a provider that slows down during a gate", "e2e/test_steps.py: both_sides_meet_the_same_conditions"),
    49: (
        "keys where an agent runs",
        "e2e/test_steps.py: an_agent_finds_no_key_where_it_runs; "
        "supervisor/test_evolution.py: kill_nine_at_any_moment_is_undone_or_finished_once",
    ),
    50: (
        "which configuration is in force",
        "e2e/test_bad_input.py: the_file_in_force_is_that_of_the_working_directory a_file_that_is_not_there",
    ),
    51: ("a key twice", "e2e/test_bad_input.py: configuration"),
    52: (
        "a session of 400 turns",
        "e2e/test_records.py: a_turn_late_in_a_long_session_costs_about_what_an_early_one_does",
    ),
    53: (
        "a model that only thinks",
        "supervisor/test_evolution.py: a_model_that_only_reasons_proposes_nothing_and_the_job_says_what_to_raise",
    ),
    54: ("reports of two scenarios on one machine", "e2e/test_installed.py: a_report_belongs_to_its_scenario"),
}


def named_in(case: int) -> list[tuple[Path, str]]:
    """File and function of each test of a case."""
    found = []
    for part in CASES[case][1].split("; "):
        file, _, names = part.partition(": ")
        found += [(ROOT / file, f"test_{name}") for name in names.split()]
    return found


@cache
def functions(file: Path) -> dict[str, list[str]]:
    """The test functions of a file with their decorators."""
    nodes = ast.parse(file.read_text(encoding="utf-8")).body
    return {
        node.name: [ast.unparse(one) for one in node.decorator_list]
        for node in nodes
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.name.startswith("test_")
    }


def test_no_case_is_left_out() -> None:
    assert list(CASES) == list(range(1, 55))


@pytest.mark.parametrize("case", CASES)
def test_a_case_has_its_tests_and_one_of_them_is_from_outside(case: int) -> None:
    named = named_in(case)
    assert named, CASES[case][0]
    for file, name in named:
        decorators = functions(file).get(name)
        assert decorators is not None, f"{CASES[case][0]}: {file.name} has no {name}"
        assert not [one for one in decorators if one.startswith("pytest.mark.skip(")], name
    assert any(OUTSIDE in file.read_text(encoding="utf-8") for file, _ in named), f"{CASES[case][0]}: no test runs a server"
