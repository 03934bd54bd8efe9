"""What the latency of messages and the waiting for one another cost: both claims of the papers, measured."""
