"""A runner for the tests of replicas, importable by a new process."""

from __future__ import annotations

import os
import time

from eagle3lab.config.errors import Problem, UserError
from eagle3lab.engines.base import EngineError


class FakeRunner:
    def __init__(self, settings):
        self.settings = settings

    def versions(self):
        return {"devices": os.environ.get("CUDA_VISIBLE_DEVICES", ""), "settings": str(self.settings)}

    def ask(self, rows):
        match rows[0][0]:
            case 1:
                raise EngineError("no answer for this one")
            case 2:
                raise UserError(Problem("no room", 7, "more", "scratch_dir=X"))
            case 3:
                time.sleep(600)
            case 4:
                time.sleep(rows[0][1] / 1000)
        return [f"file-{len(row)}" for row in rows]

    def close(self):
        pass
