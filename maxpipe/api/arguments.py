"""Check the types of arguments that a Python program passes."""

from __future__ import annotations

import contextlib
import contextvars
import dataclasses
import functools
import json
import math
import numbers
import operator
import os
from collections.abc import Callable, Iterator, Mapping
from typing import Any, ParamSpec, TypeVar

from maxpipe.errors import Code, ConfigError

P = ParamSpec("P")
T = TypeVar("T")

_COMMAND_LINE = "command line: "
_has_caller = contextvars.ContextVar("_has_caller", default=False)
"""Whether a command or another function of the API is running."""


@contextlib.contextmanager
def running_command() -> Iterator[None]:
    """Keep the location `command line` in errors of the API functions that a command calls."""
    token = _has_caller.set(True)
    try:
        yield
    finally:
        _has_caller.reset(token)


def locate_errors(function: Callable[P, T]) -> Callable[P, T]:
    """Decorate an API function, so that errors name the function in place of the command line."""

    @functools.wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> T:
        if _has_caller.get():
            return function(*args, **kwargs)
        try:
            with running_command():
                return function(*args, **kwargs)
        except ConfigError as error:
            problems = [
                dataclasses.replace(each, where=_python_location(each.where, function.__qualname__))
                for each in error.problems
            ]
            ConfigError.__init__(error, problems)
            raise

    return call


def _python_location(where: str, function: str) -> str:
    if not where.startswith(_COMMAND_LINE):
        return where
    name = where.removeprefix(_COMMAND_LINE)
    if name.startswith("--"):
        name = name.removeprefix("--").replace("-", "_")
    return f"{function}: {name}"


def argument_error(where: str, value: object, rule: str, action: str) -> ConfigError:
    """Return the error for an invalid argument."""
    return ConfigError.one(Code.API_ARGUMENT, where, _shown(value), rule, action)


def check_instance(
    where: str, value: object, kinds: type | tuple[type, ...], rule: str, action: str
) -> None:
    """Check the type of an argument.

    Raises:
        ConfigError: the argument has another type.
    """
    if not isinstance(value, kinds):
        raise argument_error(where, value, rule, action)


def check_unused(function: str, model: str, **are_set: bool) -> None:
    """Check that no argument is set that has no effect with this kind of model.

    Raises:
        ConfigError: an argument is set.
    """
    for name, is_set in are_set.items():
        if is_set:
            where, rule = f"{function}: {name}", f"has no effect with {model}."
            raise ConfigError.one(Code.API_ARGUMENT, where, None, rule, f"Leave out {name}.")


def check_path(where: str, value: object, what: str, action: str) -> None:
    """Check that an argument is a string or a path. `what` describes its meaning.

    Raises:
        ConfigError: the argument has another type.
    """
    is_text = isinstance(value, str) or (
        isinstance(value, os.PathLike) and isinstance(os.fspath(value), str)
    )
    if not is_text:
        raise argument_error(where, value, f"must be {what} as a string or path.", action)


def check_integer(where: str, value: object, least: int | None = 1) -> int:
    """Return an argument as an integer, for example from a numpy integer.

    Raises:
        ConfigError: the argument is not an integer, or is below `least`.
    """
    rule = "must be an integer" + ("." if least is None else f" of at least {least}.")
    name, low = where.rpartition(": ")[2], 1 if least is None else least
    if isinstance(value, bool) or not hasattr(value, "__index__"):
        raise argument_error(where, value, rule, f"Set {name}={low}, for example.")
    try:
        found = operator.index(value)  # type: ignore[arg-type]
    except TypeError as error:  # an array of several integers
        raise argument_error(where, value, rule, f"Set {name}={low}, for example.") from error
    if least is not None and found < least:
        raise argument_error(where, value, rule, f"Set {name}={least}, for example.")
    return found


def is_number(value: object) -> bool:
    """Return whether a value is a real number, for example of numpy, but not a bool."""
    return isinstance(value, numbers.Real) and not isinstance(value, bool)


def check_metrics(where: str, metrics: object) -> dict[str, float]:
    """Return metrics as numbers keyed by tag. A metric can be NaN, but not infinite.

    Raises:
        ConfigError: the argument is not a mapping from tags to numbers.
    """
    action = 'Pass numbers keyed by tag, such as {"eval/loss": 2.5}.'
    if not isinstance(metrics, Mapping):
        raise argument_error(where, metrics, "must be a mapping from tags to numbers.", action)
    values = {}
    for tag, value in metrics.items():
        if not isinstance(tag, str):
            raise argument_error(where, tag, "must have tags that are strings.", action)
        try:
            number = math.nan if isinstance(value, bool | str | bytes) else float(value)
            is_wrong = isinstance(value, bool | str | bytes) or math.isinf(number)
        except (TypeError, ValueError, OverflowError):
            number, is_wrong = math.nan, True
        if is_wrong:
            rule = "must be a finite number or NaN."
            raise argument_error(f"{where}[{tag!r}]", value, rule, action)
        values[tag] = number
    return values


def check_json(where: str, content: object) -> dict[str, Any]:
    """Return a mapping that JSON stores without a change.

    Raises:
        ConfigError: JSON cannot store the mapping, or would change it.
    """
    rule = "must be a mapping of JSON values: strings as keys, and strings, finite numbers, "
    rule += "booleans, None, lists and dicts as values"
    action = "Convert arrays and tuples to lists, and numbers of numpy with .item()."
    if not isinstance(content, Mapping):
        raise argument_error(where, content, f"{rule}.", action)
    try:
        given = dict(content)
        stored = json.loads(json.dumps(given, allow_nan=False))
        reason = "" if stored == given else "JSON would change the value"
    except (TypeError, ValueError, RecursionError) as error:
        stored, reason = {}, " ".join(str(error).split())
    if reason:
        raise argument_error(where, content, f"{rule}; {reason}.", action)
    return stored


def _shown(value: object) -> str:
    try:
        text = repr(value)
    except Exception:  # a user's __repr__, or a cyclic value
        text = ""
    return f"{text} ({type(value).__name__})" if text and value is not None else text or "None"
