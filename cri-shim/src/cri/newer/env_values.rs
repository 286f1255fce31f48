//! Values of variables in CreateContainer, which are bytes since Kubernetes 1.34.10, 1.35.7 and
//! 1.36.3. The message crate has strings: they are encoded alike, but must be UTF-8.
//!
//! A container's specification is JSON, in which only UTF-8 can be. As Go writes it for other
//! runtimes, each byte that is not part of UTF-8 is replaced by U+FFFD.

use bytes::{Buf as _, Bytes};
use k8s_cri::v1::CreateContainerRequest;
use prost::{DecodeError, Message as _, decode_length_delimiter, encode_length_delimiter};

/// Numbers of the fields that lead to a value: CreateContainerRequest.config,
/// ContainerConfig.envs, KeyValue.value.
const VALUE: [usize; 3] = [2, 6, 2];

/// Decodes a request whose variables may have any bytes as values.
pub(super) fn decode_create(message: Bytes) -> Result<CreateContainerRequest, DecodeError> {
    CreateContainerRequest::decode(message.clone()).or_else(|error| {
        let text = with_text(message, &VALUE).ok_or(error)?;
        CreateContainerRequest::decode(&*text)
    })
}

/// Returns a message in which the fields at this path are UTF-8; `None` if it is no message.
fn with_text(mut message: Bytes, path: &[usize]) -> Option<Vec<u8>> {
    let Some((field, rest)) = path.split_first() else {
        return Some(text(&message).into_bytes());
    };
    let mut written = Vec::with_capacity(message.len());
    while message.has_remaining() {
        let all = message.clone();
        let key = decode_length_delimiter(&mut message).ok()?;
        // The wire type; groups are not in proto3.
        let length = match key & 7 {
            0 => decode_length_delimiter(&mut message).map(|_| 0).ok()?,
            1 => 8,
            2 => decode_length_delimiter(&mut message).ok()?,
            5 => 4,
            _ => return None,
        };
        if length > message.remaining() {
            return None;
        }
        let value = message.split_to(length);
        if key == (field << 3) | 2 {
            let value = with_text(value, rest)?;
            encode_length_delimiter(key, &mut written).ok()?;
            encode_length_delimiter(value.len(), &mut written).ok()?;
            written.extend(value);
        } else {
            let read = all.len() - message.len();
            written.extend_from_slice(&all[..read]);
        }
    }
    Some(written)
}

fn text(bytes: &[u8]) -> String {
    let mut text = String::with_capacity(bytes.len());
    for chunk in bytes.utf8_chunks() {
        text.push_str(chunk.valid());
        text.extend(chunk.invalid().iter().map(|_| char::REPLACEMENT_CHARACTER));
    }
    text
}

#[cfg(test)]
mod tests {
    use k8s_cri::v1::{ContainerConfig, KeyValue, Mount, PodSandboxConfig};
    use proptest::prelude::*;

    use super::*;

    /// A request as newer kubelets encode it.
    #[derive(Clone, PartialEq, prost::Message)]
    struct NewerRequest {
        #[prost(message, optional, tag = "2")]
        config: Option<NewerConfig>,
    }

    #[derive(Clone, PartialEq, prost::Message)]
    struct NewerConfig {
        #[prost(message, repeated, tag = "6")]
        envs: Vec<NewerVariable>,
    }

    #[derive(Clone, PartialEq, prost::Message)]
    struct NewerVariable {
        #[prost(string, tag = "1")]
        key: String,
        #[prost(bytes = "vec", tag = "2")]
        value: Vec<u8>,
    }

    fn with_variables(values: &[&[u8]]) -> Vec<u8> {
        let variables = values.iter().map(|value| NewerVariable {
            key: "V".to_owned(),
            value: value.to_vec(),
        });
        let config = NewerConfig {
            envs: variables.collect(),
        };
        NewerRequest {
            config: Some(config),
        }
        .encode_to_vec()
    }

    /// A request with fields of all wire types around its variables.
    fn known() -> CreateContainerRequest {
        CreateContainerRequest {
            pod_sandbox_id: "pod".to_owned(),
            config: Some(ContainerConfig {
                args: vec!["ä".to_owned()],
                envs: vec![KeyValue {
                    key: "FIRST".to_owned(),
                    value: "1".to_owned(),
                }],
                mounts: vec![Mount {
                    container_path: "/data".to_owned(),
                    propagation: -1,
                    ..Mount::default()
                }],
                tty: true,
                ..ContainerConfig::default()
            }),
            sandbox_config: Some(PodSandboxConfig {
                hostname: "h".repeat(200),
                ..PodSandboxConfig::default()
            }),
        }
    }

    #[test]
    fn each_byte_of_a_value_that_is_not_utf_8_is_replaced() {
        let values: [&[u8]; 4] = [b"\xff", b"a\xe2\x82b", "ä€".as_bytes(), b"\xed\xa0\x80"];
        let mut message = known().encode_to_vec();
        message.extend(with_variables(&values));
        let read = decode_create(message.into()).unwrap();
        let variables = &read.config.as_ref().unwrap().envs;
        let values: Vec<&str> = variables.iter().map(|one| one.value.as_str()).collect();
        let replaced = "\u{fffd}\u{fffd}\u{fffd}";
        assert_eq!(
            values,
            ["1", "\u{fffd}", "a\u{fffd}\u{fffd}b", "ä€", replaced]
        );
        assert_eq!(variables[4].key, "V");
        let mut others = read.clone();
        others.config.as_mut().unwrap().envs.truncate(1);
        assert_eq!(others, known());
    }

    #[test]
    fn other_fields_must_be_utf_8() {
        // ContainerConfig.working_dir, of one byte.
        let message = [0x12, 3, 0x2a, 1, 0xff];
        assert!(decode_create(Bytes::copy_from_slice(&message)).is_err());
    }

    proptest! {
        #[test]
        fn any_bytes_are_read_without_panic(bytes: Vec<u8>) {
            let _ = decode_create(bytes.into());
        }

        #[test]
        fn a_request_with_any_values_is_read(values: Vec<Vec<u8>>, cut: usize) {
            let values: Vec<&[u8]> = values.iter().map(Vec::as_slice).collect();
            let mut message = with_variables(&values);
            let read = decode_create(message.clone().into()).unwrap();
            let read = read.config.unwrap_or_default().envs;
            let expected: Vec<String> = values.iter().map(|value| text(value)).collect();
            let read: Vec<String> = read.into_iter().map(|one| one.value).collect();
            prop_assert_eq!(read, expected);
            message.truncate(cut % (message.len() + 1));
            let _ = decode_create(message.into());
        }
    }
}
