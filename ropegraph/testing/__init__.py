"""Oracle, error budgets and inputs for tests and verify."""
