"""The facade: select, load, explain, plan, and the state of this process behind them."""
