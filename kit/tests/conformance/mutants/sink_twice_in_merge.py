"""Includes the sink in both passes of cascade attention."""

from __future__ import annotations

from attnplug.torch_backend.impl import TorchImpl, merge_passes, results_of_pass


class MutantImpl(TorchImpl):
    def _run(self, plan, query, source, results):
        if plan.prefix is None:
            super()._run(plan, query, source, results)
            return
        passes = [results_of_pass(results, plan.prefix.rows, self._sinks) for _ in range(2)]
        self._run_groups(plan, (plan.prefix,), query, source, passes[0])
        self._run_groups(plan, plan.groups, query, source, passes[1])
        merge_passes(results, *passes)
