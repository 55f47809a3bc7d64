"""Design before spending: what interval a planned grid would give, and the cheapest that will do."""
