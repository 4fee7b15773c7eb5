"""Shipped tasks."""

from __future__ import annotations
