def pytest_configure(config):
    config.addinivalue_line("markers", "kernels_ci: the subset that checks a build within a few seconds")
