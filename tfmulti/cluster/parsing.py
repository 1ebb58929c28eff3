"""The text of a `TF_CONFIG`, parsed and checked, with one message for each kind of mistake.

The rules are those of `tf.distribute.MultiWorkerMirroredStrategy`; see
https://www.tensorflow.org/tutorials/distribute/multi_worker_with_keras
and, where parameter servers are allowed, of `tf.distribute.ParameterServerStrategy`.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from tfmulti.cluster.errors import ClusterError, setting_error, show, suggest
from tfmulti.cluster.network import address_fault, split_address
from tfmulti.cluster.task import SERVER_TYPE, TRAINING_TYPES, Cluster

ENVIRONMENT = "the environment variable TF_CONFIG"
TASK_TYPES = ("chief", "worker", "evaluator")
_KEYS = ("cluster", "task")
# Written by TensorFlow's own resolver, Kubeflow and Vertex AI; training does not need them.
_HARMLESS_KEYS = ("environment", "job", "rpc_layer", "session_master")
_EXAMPLE = (
    '{"cluster": {"worker": ["10.0.0.1:12345", "10.0.0.2:12345"]}, '
    '"task": {"type": "worker", "index": 0}}'
)

Fail = Callable[..., ClusterError]


def from_tf_config(
    config: str | Mapping[str, Any], *, source: str = ENVIRONMENT, servers: bool = False
) -> Cluster:
    """Parses and checks a `TF_CONFIG`.

    Args:
        config: the JSON text, or what it would parse to.
        source: where it came from, for the messages.
        servers: whether parameter servers, tasks of type `"ps"`, are allowed.

    Returns:
        The cluster, with the types in the order chief, worker, evaluator, ps.

    Raises:
        ClusterError: for the first mistake that is found.

    Example:
        >>> from_tf_config({
        ...     "cluster": {"chief": ["a:1"], "worker": ["b:1"]},
        ...     "task": {"type": "worker", "index": "0"},
        ... }).tasks
        (('chief', 0), ('worker', 0))
    """
    fail = partial(setting_error, source=source)
    fields = _load_json(config, fail) if isinstance(config, str) else config
    _check_object(fields, "TF_CONFIG", f"Write {_EXAMPLE}.", fail)
    if "sparseCluster" in fields:
        rule = "must be a cluster of fixed size; this one may grow"
        advice = 'Write "enableDynamicWorker: false" in the TFJob, or leave it out.'
        raise fail('TF_CONFIG["sparseCluster"]', rule, received=show(fields), advice=advice)
    for key in fields:
        if key not in (*_KEYS, *_HARMLESS_KEYS):
            rule = 'has an unknown key; its keys are "cluster" and "task"'
            advice = f"{suggest(key, _KEYS)}Write {_EXAMPLE}."
            raise fail(f"TF_CONFIG[{show(key)}]", rule, received=show(key), advice=advice)
    _check_has(fields, _KEYS, "TF_CONFIG", f"Write {_EXAMPLE}.", fail)
    allowed = (*TASK_TYPES, SERVER_TYPE) if servers else TASK_TYPES
    spec = _parse_spec(fields["cluster"], allowed, fail)
    # Kubeflow and Vertex AI write it, and start the tasks one after the other.
    late = fields.get("environment") == "cloud"
    trains = (*TRAINING_TYPES, SERVER_TYPE) if servers else TRAINING_TYPES
    return Cluster(spec, *_parse_task(fields["task"], spec, trains, fail), names_come_late=late)


def parse_index(value: object) -> int | None:
    """Returns a task index that is a number or digits, or None for anything else.

    Example:
        >>> [parse_index(value) for value in (1, "0", True, 1.0, -1, "one")]
        [1, 0, None, None, None, None]
    """
    if isinstance(value, str) and len(value) <= 9 and value.isascii() and value.isdigit():
        return int(value)
    # A bool is an int to Python, and `true` in JSON is a slip of the pen.
    if isinstance(value, int) and not isinstance(value, bool) and value >= 0:
        return value
    return None


def _load_json(text: str, fail: Fail) -> object:
    if not text.strip():
        advice = f"Write {_EXAMPLE}; to train without a cluster, unset TF_CONFIG altogether."
        raise fail("TF_CONFIG", "must not be empty", received=show(text), advice=advice)

    def build_object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        fields = dict(pairs)
        if len(fields) != len(pairs):
            # JSON parsers keep the last one, so the addresses under the first would vanish.
            keys = [key for key, _ in pairs]
            twice = next(key for key in keys if keys.count(key) > 1)
            rule = f'must have the key "{twice}" only once in an object'
            advice = f'Write all that belongs to "{twice}" under one key.'
            raise fail("TF_CONFIG", rule, received=show(keys), advice=advice)
        return fields

    try:
        return json.loads(text, object_pairs_hook=build_object)
    except json.JSONDecodeError as error:
        where = f"line {error.lineno}, column {error.colno}: {error.msg}"
        if text.strip().endswith(".json"):
            advice = "This looks like a path: hand it over as `tf_config`, or put the text in."
        else:
            advice = (
                f"Use double quotes inside, and in a shell single quotes around it: '{_EXAMPLE}'."
            )
        rule = "must be JSON"
        raise fail("TF_CONFIG", rule, received=f"{show(text)}, {where}", advice=advice) from None


def _check_object(value: object, field: str, advice: str, fail: Fail) -> None:
    if not isinstance(value, Mapping):
        raise fail(field, "must be a JSON object", received=show(value), advice=advice)


def _check_has(fields: Mapping, keys: tuple[str, ...], field: str, advice: str, fail: Fail) -> None:
    for key in keys:
        if key not in fields:
            alike = [other for other in fields if other not in keys and suggest(other, [key])]
            hint = f"Rename the key {show(alike[0])}. " if alike else ""
            rule = f'must have the key "{key}"'
            raise fail(field, rule, received=show(fields), advice=f"{hint}{advice}")


def _parse_spec(value: object, allowed: tuple[str, ...], fail: Fail) -> dict[str, tuple[str, ...]]:
    field = 'TF_CONFIG["cluster"]'
    advice = 'Write addresses by task type, as {"worker": ["10.0.0.1:12345", "10.0.0.2:12345"]}.'
    _check_object(value, field, advice, fail)
    for task_type in value:
        if task_type not in allowed:
            raise _spec_type_error(task_type, f"{field}[{show(task_type)}]", allowed, fail)
    if not any(task_type in value for task_type in TRAINING_TYPES):
        rule = 'must have a "worker" or a "chief" task'
        raise fail(field, rule, received=show(value), advice=advice)
    seen: dict[tuple[str, int], str] = {}
    spec = {
        task_type: _parse_addresses(value[task_type], f'{field}["{task_type}"]', seen, fail)
        for task_type in allowed
        if task_type in value
    }
    if len(spec.get("chief", ())) > 1:
        raise fail(
            f'{field}["chief"]',
            "must have exactly one address: one worker writes",
            received=show(value["chief"]),
            advice='Leave one there and move the others to "worker".',
        )
    return spec


def _spec_type_error(
    task_type: object, field: str, allowed: tuple[str, ...], fail: Fail
) -> ClusterError:
    if task_type == SERVER_TYPE:
        rule = "must not be given: multi_worker trains without parameter servers"
        advice = (
            'Remove "ps": every "worker" keeps a copy of the variables; or choose the strategy '
            "parameter_server."
        )
    elif task_type == "master":
        rule = "is an old name that TensorFlow 2 does not train with"
        advice = 'Write "chief" in its place, in `cluster` and in `task`.'
    else:
        rule = f"is an unknown task type; the types are {_listed(allowed, 'and')}"
        advice = f'{suggest(task_type, allowed)}Write "worker" for a task that trains.'
    return fail(field, rule, received=show(task_type), advice=advice)


def _listed(names: tuple[str, ...], word: str) -> str:
    *others, last = (f'"{name}"' for name in names)
    return f"{', '.join(others)} {word} {last}"


def _parse_addresses(
    value: object, field: str, seen: dict[tuple[str, int], str], fail: Fail
) -> tuple[str, ...]:
    if not isinstance(value, (list, tuple)):
        rule, advice = "must be a list of addresses", 'Write ["10.0.0.1:12345", "10.0.0.2:12345"].'
        raise fail(field, rule, received=show(value), advice=advice)
    if not value:
        advice = 'Write at least one address, as ["10.0.0.1:12345"], or remove the key.'
        raise fail(field, "must not be an empty list", received=show(value), advice=advice)
    for index, address in enumerate(value):
        place = f"{field}[{index}]"
        fault = address_fault(address)
        if fault:
            raise fail(place, fault[0], received=show(address), advice=fault[1])
        host, port = split_address(address)
        first = seen.setdefault((host.lower(), port), place)
        if first != place:
            rule = f"must differ from every other address, and is the same as `{first}`"
            advice = "Give each task a different host or port."
            raise fail(place, rule, received=show(address), advice=advice)
    return tuple(value)


def _parse_task(
    value: object, spec: Mapping[str, tuple[str, ...]], trains: tuple[str, ...], fail: Fail
) -> tuple[str, int]:
    field = 'TF_CONFIG["task"]'
    advice = 'Write which task this process is, as {"type": "worker", "index": 0}.'
    _check_object(value, field, advice, fail)
    _check_has(value, ("type", "index"), field, advice, fail)
    task_type = value["type"]
    _check_task_type(task_type, f'{field}["type"]', spec, trains, fail)
    index = parse_index(value["index"])
    count = len(spec[task_type])
    if index is None or index >= count:
        allowed = "0" if count == 1 else f"an integer from 0 to {count - 1}"
        raise fail(
            f'{field}["index"]',
            f'must be {allowed}; number of "{task_type}" tasks in the cluster: {count}',
            received=show(value["index"]),
            advice=f'Write the position of this task in `TF_CONFIG["cluster"]["{task_type}"]`,'
            " or add its address there.",
        )
    return task_type, index


def _check_task_type(
    task_type: object, field: str, spec: Mapping, trains: tuple[str, ...], fail: Fail
) -> None:
    mine = [name for name in trains if name in spec]
    if task_type in mine:
        return
    advice = f"Write one of those that the cluster has: {show(mine)}."
    types = _listed(trains, "or")
    if task_type in (SERVER_TYPE, "evaluator") and task_type not in trains:
        has_servers = SERVER_TYPE in trains
        strategy = "ParameterServer" if has_servers else "MultiWorkerMirrored"
        rule = f"must be {types}: {strategy}Strategy trains on these alone"
    elif task_type in trains:
        rule = 'must be a type that `TF_CONFIG["cluster"]` has'
        advice += f' Or add the address of this task under "{task_type}".'
    elif task_type == "master":
        rule, advice = "is an old name that TensorFlow 2 does not train with", 'Write "chief".'
    else:
        rule = f"must be {types}"
        advice = f"{suggest(task_type, trains)}{advice}"
    raise fail(field, rule, received=show(task_type), advice=advice)
