//! What to decide: pure functions and state machines, without I/O, clock or tasks.
