//! rabbitmq.
