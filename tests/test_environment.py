from __future__ import annotations

import json

from fednl.environment import environment


def test_the_environment_names_no_host_and_no_user() -> None:
    import getpass
    import platform

    facts = environment()
    text = json.dumps(facts)
    assert platform.node() not in text.replace(platform.machine(), "") or len(platform.node()) < 3
    assert f'"{getpass.getuser()}"' not in text
    assert facts["packages"]["fednl"] and facts["packages"]["torch"] and facts["cpu_count"] >= 1
