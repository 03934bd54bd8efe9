"""Tests by the wall clock on the event loop of their own choice."""

import asyncio

import pytest
import uvloop

on_both_loops = pytest.mark.parametrize(
    "loop", [asyncio.new_event_loop, uvloop.new_event_loop], ids=["asyncio", "uvloop"]
)
on_uvloop = pytest.mark.parametrize("loop", [uvloop.new_event_loop], ids=["uvloop"])
