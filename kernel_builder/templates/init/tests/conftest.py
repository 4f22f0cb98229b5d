def pytest_configure(config):
    config.addinivalue_line("markers", "kernels_ci: the tests that check a build within a few seconds")
