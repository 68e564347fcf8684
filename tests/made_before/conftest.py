"""Every archive, unpacked once."""

from __future__ import annotations

import pytest
from made_before.archives import Kept, kept_in, names


@pytest.fixture(scope="module", params=names())
def kept(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Kept:
    return kept_in(request.param, tmp_path_factory.mktemp("kept"))
