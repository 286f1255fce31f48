//! Messages of the CRI in records: as protobuf in base64, which a podvisor with fewer fields, or
//! with more, can read too.

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use prost::Message;
use serde::de::Error as _;
use serde::{Deserialize as _, Deserializer, Serializer};

pub(super) fn serialize<T, S>(message: &T, serializer: S) -> Result<S::Ok, S::Error>
where
    T: Message,
    S: Serializer,
{
    serializer.serialize_str(&STANDARD.encode(message.encode_to_vec()))
}

pub(super) fn deserialize<'de, T, D>(deserializer: D) -> Result<T, D::Error>
where
    T: Message + Default,
    D: Deserializer<'de>,
{
    let text = String::deserialize(deserializer)?;
    let bytes = STANDARD.decode(text).map_err(D::Error::custom)?;
    T::decode(bytes.as_slice()).map_err(D::Error::custom)
}

#[cfg(test)]
mod tests {
    use podvisor_cri_messages::{ContainerConfig, KeyValue, Mount};
    use prost::Message;
    use serde_json::{Value, json};

    use super::*;

    #[derive(Debug, PartialEq, serde::Serialize, serde::Deserialize)]
    struct CachedRecord<T: Message + Default> {
        #[serde(with = "super", bound = "")]
        config: T,
    }

    fn config() -> ContainerConfig {
        ContainerConfig {
            args: vec!["a".to_owned(), String::new()],
            envs: vec![KeyValue {
                key: "K".to_owned(),
                value: vec![0xff, 0],
            }],
            mounts: vec![Mount {
                container_path: "/data".to_owned(),
                readonly: true,
                ..Default::default()
            }],
            labels: [("l".to_owned(), "v".to_owned())].into(),
            tty: true,
            ..Default::default()
        }
    }

    /// A field of a message that no version of the CRI has: the string "new", number 999.
    const NEWER_FIELD: [u8; 6] = [0xba, 0x3e, 3, b'n', b'e', b'w'];

    /// As ContainerConfig was before most of its fields.
    #[derive(Clone, PartialEq, Message)]
    struct Older {
        #[prost(string, repeated, tag = "4")]
        args: Vec<String>,
    }

    #[test]
    fn messages_are_read_as_they_were_written() {
        let kept = CachedRecord { config: config() };
        let json = serde_json::to_string(&kept).unwrap();
        assert_eq!(
            serde_json::from_str::<CachedRecord<ContainerConfig>>(&json).unwrap(),
            kept
        );
    }

    #[test]
    fn messages_with_more_fields_and_with_fewer_are_read() {
        let mut bytes = config().encode_to_vec();
        bytes.extend(NEWER_FIELD);
        let newer = json!({ "config": STANDARD.encode(bytes) });
        let read: CachedRecord<ContainerConfig> = serde_json::from_value(newer).unwrap();
        assert_eq!(read.config, config());
        let older = Older {
            args: config().args,
        };
        let json = serde_json::to_value(CachedRecord { config: older }).unwrap();
        let read: CachedRecord<ContainerConfig> = serde_json::from_value(json).unwrap();
        let expected = ContainerConfig {
            args: config().args,
            ..Default::default()
        };
        assert_eq!(read.config, expected);
        let json = serde_json::to_value(CachedRecord { config: config() }).unwrap();
        let read: CachedRecord<Older> = serde_json::from_value(json).unwrap();
        assert_eq!(read.config.args, config().args);
    }

    #[test]
    fn what_is_no_message_is_refused() {
        for bad in [json!("%"), json!("CgX/"), json!(7), json!({}), Value::Null] {
            let read =
                serde_json::from_value::<CachedRecord<ContainerConfig>>(json!({ "config": bad }));
            assert!(read.is_err(), "{bad}");
        }
    }
}
