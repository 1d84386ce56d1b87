"""The errors: what they derive from, and how a message is put together."""

from __future__ import annotations

import pickle

import pytest

from hyper_resume import errors
from hyper_resume.errors import describe

BUILTINS: dict[type[Exception], type[Exception]] = {
    errors.ConfigError: ValueError,
    errors.CheckpointNotFoundError: FileNotFoundError,
    errors.CheckpointMismatchError: RuntimeError,
    errors.InsufficientMemoryError: MemoryError,
    errors.CheckpointSaveError: RuntimeError,
    errors.StateNotPlainError: TypeError,
    errors.CheckpointLockedError: RuntimeError,
    errors.CheckpointExistsError: RuntimeError,
    errors.CheckpointUnreadableError: OSError,
    errors.PreemptedError: RuntimeError,
    errors.ReplicaMismatchError: RuntimeError,
    errors.TrainingIncompleteError: RuntimeError,
    errors.UnsupportedError: RuntimeError,
}


def test_every_error_of_the_library_is_in_the_table() -> None:
    own = {
        value
        for value in vars(errors).values()
        if isinstance(value, type) and issubclass(value, errors.HyperResumeError)
    }
    assert own - {errors.HyperResumeError} == set(BUILTINS)


@pytest.mark.parametrize("error_class", BUILTINS, ids=lambda error_class: error_class.__name__)
def test_an_error_can_be_caught_by_either_class_and_travels_between_processes(error_class: type[Exception]) -> None:
    error = error_class("what happened")
    assert isinstance(error, errors.HyperResumeError)
    assert isinstance(error, BUILTINS[error_class])
    assert str(error) == "what happened"
    copy = pickle.loads(pickle.dumps(error))
    assert type(copy) is error_class
    assert str(copy) == "what happened"
    assert error_class.__doc__


def test_a_message_has_its_parts_in_reading_order() -> None:
    text = describe("it broke", where="here", expected="this", found="that", do="mend it")
    assert text == "it broke; where: here; expected: this; found: that; what to do: mend it"


def test_a_part_that_is_not_given_is_left_out() -> None:
    assert describe("it broke") == "it broke"
    assert describe("it broke", found="that") == "it broke; found: that"
