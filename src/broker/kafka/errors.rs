//! Classifies librdkafka's error codes: about the message, the destination or the session.
//!
//! Promise: only an error about the message itself counts as the message's fault (R16). An error
//! about the destination never does. Every unknown error puts the session in doubt.

use rdkafka::error::{KafkaError, RDKafkaErrorCode as Code};

use crate::broker::Refusal;

/// Why a row was not taken, from its delivery report or from the client itself.
pub(super) fn refusal(topic: &str, error: &KafkaError) -> Refusal {
    let Some(code) = error.rdkafka_error_code() else { return Refusal::Session(error.to_string()) };
    match code {
        // `InvalidMessage` is CORRUPT_MESSAGE. The broker answers it for a property of the message,
        // such as a null key on a compacted topic; damage on the way is first retried by
        // librdkafka.
        Code::MessageSizeTooLarge | Code::InvalidMessageSize | Code::InvalidMessage | Code::InvalidRecord => {
            Refusal::Message(format!("kafka refuses the message for topic `{topic}`: {code}"))
        }
        Code::UnknownTopic
        | Code::UnknownTopicOrPartition
        | Code::UnknownPartition
        | Code::InvalidTopic
        | Code::TopicAuthorizationFailed
        | Code::NotEnoughReplicas
        | Code::NotEnoughReplicasAfterAppend
        // The disk under a partition failed. This passes when another broker leads the partition.
        | Code::KafkaStorageError => Refusal::Destination(format!("kafka topic `{topic}`: {code}")),
        // A record has the time of its row. So the message is not at fault, but the database's
        // clock or a setting of the topic.
        Code::InvalidTimestamp => Refusal::Destination(format!(
            "kafka topic `{topic}`: {code}: the clocks of the database and of kafka differ, or the topic's \
             `message.timestamp.before.max.ms` or `message.timestamp.after.max.ms` is shorter than messages wait"
        )),
        _ => Refusal::Session(format!("kafka topic `{topic}`: {code}")),
    }
}

/// Why a topic cannot be used, in words, from the error in its metadata.
pub(super) fn topic_trouble(code: Code) -> String {
    match code {
        Code::UnknownTopic | Code::UnknownTopicOrPartition => "the topic does not exist".to_owned(),
        Code::TopicAuthorizationFailed => "access to the topic is denied".to_owned(),
        code => code.to_string(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn r16_only_what_speaks_of_the_message_is_the_messages_fault() {
        let kind = |code| match refusal("t", &KafkaError::MessageProduction(code)) {
            Refusal::Message(_) => 'm',
            Refusal::Destination(_) => 'd',
            Refusal::Session(_) | Refusal::Behind(_) => 's',
        };
        for code in [Code::MessageSizeTooLarge, Code::InvalidMessage, Code::InvalidRecord, Code::InvalidMessageSize] {
            assert_eq!(kind(code), 'm', "{code}");
        }
        for code in [
            Code::UnknownTopicOrPartition,
            Code::UnknownTopic,
            Code::UnknownPartition,
            Code::InvalidTopic,
            Code::TopicAuthorizationFailed,
            Code::NotEnoughReplicas,
            Code::NotEnoughReplicasAfterAppend,
            Code::KafkaStorageError,
            Code::InvalidTimestamp,
        ] {
            assert_eq!(kind(code), 'd', "{code}");
        }
        for code in [
            Code::PurgeQueue,
            Code::PurgeInflight,
            Code::Fatal,
            Code::MessageTimedOut,
            Code::RequestTimedOut,
            Code::OutOfOrderSequenceNumber,
            Code::UnknownProducerId,
            Code::ClusterAuthorizationFailed,
            Code::QueueFull,
        ] {
            assert_eq!(kind(code), 's', "{code}");
        }
    }
}
