"""The JSON Schema of a quality result, with what every field means.

Called by `report` and by the test that keeps results/quality.schema.json the same. Data only.
`kvlab quality schema` prints it.
"""

from __future__ import annotations

import json
from typing import Any

from kvlab.quality.estimates import METRICS
from kvlab.quality.setting import METHODS

Json = dict[str, Any]
SCHEMA_VERSION = "1.0"

TEXT: Json = {"type": "string", "minLength": 1}
ANY_TEXT: Json = {"type": "string"}
TEXT_OR_NULL: Json = {"type": ["string", "null"]}
COUNT: Json = {"type": "integer", "minimum": 0}
COUNT_OR_NULL: Json = {"type": ["integer", "null"], "minimum": 0}
NUMBER: Json = {"type": "number"}
ERROR: Json = {"type": ["number", "null"], "minimum": 0}
FLAG: Json = {"type": "boolean"}
DIGEST: Json = {"type": "string", "pattern": "^[0-9a-f]{64}$"}
MOMENT: Json = {"type": "string", "pattern": r"^\d{4}-\d\d-\d\dT\d\d:\d\d:\d\dZ$"}


def _about(text: str, of: Json) -> Json:
    return {**of, "description": text}


def _all_of(**properties: Json) -> Json:
    """Every field required and no other allowed."""
    return {
        "type": "object",
        "properties": properties,
        "required": list(properties),
        "additionalProperties": False,
    }


def _many(items: Json) -> Json:
    return {"type": "array", "items": items}


def _defined(name: str) -> Json:
    return {"$ref": f"#/$defs/{name}"}


IDS = _many(TEXT)
SETTING = _all_of(
    method={"enum": list(METHODS)},
    key_bits=_about("0 where nothing is quantized", COUNT),
    value_bits=COUNT,
    group=_about("values that share a scale; 0 without groups", COUNT),
    window=_about(
        "hqq and quanto: exact tokens collected before all are quantized again; course: exact "
        "tokens at the end, at least",
        COUNT,
    ),
    sinks=_about("exact tokens at the start", COUNT),
    fits=_about(
        "course: how often the scale of Keys is fitted by least squares", COUNT
    ),
    key_axis=_about("as the method counts axes", ANY_TEXT),
    value_axis=ANY_TEXT,
    key_shift=_about("added to two channels a head of every Key", NUMBER),
)
OF_TEXT = _all_of(
    mean=NUMBER,
    standard_error=_about("tokens taken as independent", ERROR),
    blocks=_about("means of blocks of tokens in a row", _many(NUMBER)),
)
MEAN = _all_of(
    mean=NUMBER,
    standard_error=_about("tokens taken as independent, which they are not", ERROR),
    standard_error_blocks=_about("over blocks of tokens in a row", ERROR),
    standard_error_texts=_about("over texts; null with one text", ERROR),
)
RATIO = _all_of(
    ratio=_about("rival's mean KL over the course's", NUMBER),
    standard_error_blocks=_about("paired over blocks, delta method", ERROR),
    standard_error_texts=_about("jackknife over texts; null with one text", ERROR),
    by_text=_many(NUMBER),
)
BYTES = _all_of(
    held=_about("counted from the cache object at the end of the run", COUNT),
    held_mean=_about("mean over the steps after the prompt", COUNT),
    held_in_16_bits=_about("at the end, were Keys and Values 16-bit numbers", COUNT),
    allocated=_about("with the room kept for tokens to come", COUNT),
)
ROW = _all_of(
    id=TEXT,
    family=_about("method and axes: one curve", TEXT),
    bits=ANY_TEXT,
    setting=_defined("setting"),
    bytes=_defined("bytes"),
    **{name: _defined("mean") for name in METRICS},
    by_text=_many(
        _all_of(
            text=TEXT,
            nll=_about("nats a token", NUMBER),
            **{name: _defined("of_text") for name in METRICS},
        )
    ),
)
TOP = _all_of(
    schema_version={"const": SCHEMA_VERSION},
    kind={"const": "quality"},
    label=TEXT,
    plan=_about("full or quick", TEXT),
    framework=_all_of(
        python=TEXT,
        torch=TEXT_OR_NULL,
        transformers=TEXT_OR_NULL,
        hqq=TEXT_OR_NULL,
        optimum_quanto=TEXT_OR_NULL,
        kvlab=TEXT,
    ),
    hardware=_all_of(
        cuda_available=FLAG,
        cuda=TEXT_OR_NULL,
        device=TEXT_OR_NULL,
        total_memory_bytes=COUNT_OR_NULL,
        compute_capability=TEXT_OR_NULL,
        cpu=TEXT_OR_NULL,
        cpu_cores=COUNT_OR_NULL,
        threads=COUNT,
    ),
    model=_all_of(
        model_id=TEXT,
        commit=_about("of the hub, or sha256 of the embedded model's file", TEXT),
        source=TEXT,
        dtype=TEXT,
    ),
    course_cache_sha256=_about("of the source of kvlab.cache", DIGEST),
    workload=_all_of(
        texts=_many(
            _all_of(
                name=TEXT,
                sha256=_about("of the text", DIGEST),
                token_ids_sha256=_about("of the fed tokens as JSON", DIGEST),
            )
        ),
        prompt_tokens=COUNT,
        scored_tokens=_about("after the prompt; the last is not fed", COUNT),
        block=COUNT,
        topk=COUNT,
        errors=TEXT,
    ),
    rows=_about("every measured cache once", _many(_defined("row"))),
    impossible=_many(_all_of(id=TEXT, family=TEXT, reason=TEXT)),
    table=_about("ids of rows", IDS),
    equal_bytes=_many(
        _all_of(
            id=TEXT,
            kv_bits=_about("in which unquantized numbers are counted", COUNT),
            course=TEXT,
            rivals=_about("hold the same bytes within 2 %", IDS),
            best=_many(
                _all_of(
                    method=TEXT,
                    id=TEXT,
                    required_ratio=NUMBER,
                    kl_ratio=_defined("ratio"),
                )
            ),
        )
    ),
    axes=_about("four combinations of axes at the same bytes", _many(IDS)),
    shifts=_all_of(
        sizes=_many(NUMBER),
        texts=IDS,
        caches=_many(_all_of(id=TEXT, rows=IDS)),
    ),
    variants=_all_of(texts=IDS, rows=IDS),
    claims=_many(_all_of(claim=TEXT, found=TEXT, holds=FLAG)),
    run=_all_of(
        finished_utc=MOMENT,
        seconds=_about("spent on the units, all processes together", NUMBER),
        units=_about("one cache on one text", COUNT),
        resumed_units=COUNT,
        processes=COUNT,
    ),
)


def schema() -> Json:
    """The whole schema, draft 2020-12."""
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "Quality against bytes of quantized KV caches",
        "description": "Bytes of the whole cache; KL and NLL in nats a token; overlap as a share.",
        **TOP,
        "$defs": {
            "setting": SETTING,
            "bytes": BYTES,
            "of_text": OF_TEXT,
            "mean": MEAN,
            "ratio": RATIO,
            "row": ROW,
        },
    }


def schema_text() -> str:
    """The schema as results/quality.schema.json holds it."""
    return json.dumps(schema(), indent=1, ensure_ascii=False) + "\n"


def faults(record: Json) -> list[str]:
    """What is wrong with a record, in words; empty when it fits.

    raises ImportError where jsonschema is not installed
    """
    from jsonschema import (  # type: ignore[import-untyped]
        Draft202012Validator,
    )

    return [
        f"{'/'.join(map(str, error.absolute_path)) or 'top'}: {error.message}"
        for error in Draft202012Validator(schema()).iter_errors(record)
    ]
