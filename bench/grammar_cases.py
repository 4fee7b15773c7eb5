"""The JSON schemas of ``bench_grammars.py``, each with documents that fit it and documents that don't."""

from __future__ import annotations

from typing import Any, NamedTuple

from bench_constrained import PERSON


class Case(NamedTuple):
    name: str
    schema: dict[str, Any]
    valid: list[Any]
    invalid: list[Any]


def closed(**fields: Any) -> dict[str, Any]:
    """Return the schema of an object with exactly these fields."""
    return {"type": "object", "properties": fields, "required": list(fields), "additionalProperties": False}


def people(count: int) -> list[dict[str, Any]]:
    person = {"name": "Ada", "role": "pilot", "age": 36, "height": 1.68, "married": True, "town": "London"}
    return [person | {"name": f"Ada {number}", "age": number % 121} for number in range(count)]


TAGS = {"type": "array", "items": {"enum": ["fragile", "gift", "heavy"]}, "maxItems": 2}
LINE = closed(sku={"type": "string", "maxLength": 8}, count={"type": "integer", "minimum": 1}, tags=TAGS)
ORDER = closed(customer=closed(name={"type": "string"}), lines={"type": "array", "items": LINE, "minItems": 1})
BOOKING = closed(code={"type": "string", "pattern": "^[A-Z]{2}-[0-9]{4}$"}, day={"type": "string", "format": "date"})
NODE = closed(name={"type": "string"}, children={"type": "array", "items": {"$ref": "#/$defs/node"}})

EVA, SKU = {"name": "Eva"}, {"sku": "A-17", "count": 2, "tags": ["gift", "heavy"]}
LEAF: dict[str, Any] = {"name": "leaf", "children": []}
DEEP = LEAF
for depth in range(6):
    DEEP = {"name": f"level {depth}", "children": [DEEP, LEAF]}
[ADA] = people(1)

CASES = (
    Case(
        "pattern, date",
        BOOKING,
        valid=[{"code": "AB-1234", "day": "2026-11-27"}, {"code": "ZZ-0000", "day": "2024-02-29"}],
        invalid=[
            {"code": "AB-123", "day": "2026-11-27"},
            {"code": "xAB-1234", "day": "2026-11-27"},
            {"code": "AB-1234", "day": "2026-13-27"},
            {"code": "AB-1234", "day": "2026-02-30"},
            {"code": "AB-1234"},
        ],
    ),
    Case(
        "nested",
        ORDER,
        valid=[{"customer": EVA, "lines": [SKU, {"sku": "", "count": 120, "tags": []}, SKU]}],
        invalid=[
            {"customer": EVA, "lines": []},
            {"customer": {}, "lines": [SKU]},
            {"customer": EVA, "lines": [SKU | {"count": 0}]},
            {"customer": EVA, "lines": [SKU | {"sku": "A-1234567"}]},
            {"customer": EVA, "lines": [SKU | {"tags": ["red"]}]},
            {"customer": EVA, "lines": [SKU | {"tags": ["gift", "gift", "gift"]}]},
        ],
    ),
    Case(
        "recursive",
        {"$defs": {"node": NODE}, "$ref": "#/$defs/node"},
        valid=[{"name": "root", "children": [LEAF, LEAF]}, DEEP],
        invalid=[{"name": "root"}, {"name": "root", "children": [{"name": "leaf"}]}],
    ),
    Case(
        "people",
        {"type": "array", "items": PERSON, "minItems": 2},
        valid=[people(2), people(5), [ADA, ADA | {"name": 'Ada "Al" Byron'}]],
        invalid=[
            [ADA],
            [ADA, ADA | {"age": 121}],
            [ADA, ADA | {"age": 1.5}],
            [ADA, ADA | {"role": "king"}],
            [ADA, ADA | {"name": 31 * "a"}],
            [ADA, ADA | {"extra": 1}],
        ],
    ),
    Case("500 people", {"type": "array", "items": PERSON, "minItems": 500}, [people(500)], [people(499)]),
)
"""The people are those of ``bench_constrained.py``."""
