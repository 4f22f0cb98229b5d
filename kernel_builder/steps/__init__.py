"""(Projects, variants, toolchains) -> binaries: include scan, plan, ninja and the cache of their outputs."""
