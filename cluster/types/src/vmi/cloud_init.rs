//! cloud-init's data (`spec.volumes[].cloudInit…`).

use super::{
    count,
    references::{LocalReference, validate_name},
};
use crate::{Causes, FieldPath};

/// Inline data is for a few lines: more belongs into a Secret.
const MAX_INLINE: usize = 2048;

object! {
    /// cloud-init's data: user data, network data, or both.
    pub struct CloudInit {
        /// Secret with the user data.
        pub secret_ref: Option<LocalReference>,
        /// User data in base64.
        pub user_data_base64: Option<String>,
        /// User data.
        pub user_data: Option<String>,
        /// Secret with the network data.
        pub network_data_secret_ref: Option<LocalReference>,
        /// Network data in base64.
        pub network_data_base64: Option<String>,
        /// Network data.
        pub network_data: Option<String>,
    }
}

pub(super) fn validate(data: &CloudInit, path: &FieldPath, causes: &mut Causes) {
    let given = |text: &Option<String>| text.as_ref().is_some_and(|text| !text.is_empty());
    let user = count(&[
        data.secret_ref.is_some(),
        given(&data.user_data_base64),
        given(&data.user_data),
    ]);
    let network = count(&[
        data.network_data_secret_ref.is_some(),
        given(&data.network_data_base64),
        given(&data.network_data),
    ]);
    if user > 1 {
        causes.invalid(path, "must not have more than one source of user data");
    }
    if network > 1 {
        causes.invalid(path, "must not have more than one source of network data");
    }
    if user + network == 0 {
        causes.required(path, "must have user data or network data");
    }
    let references = [
        ("secretRef", &data.secret_ref),
        ("networkDataSecretRef", &data.network_data_secret_ref),
    ];
    for (name, reference) in references {
        if let Some(reference) = reference {
            validate_name(&reference.name, &path.child(name).child("name"), causes);
        }
    }
    let texts = [
        ("userDataBase64", &data.user_data_base64, true),
        ("userData", &data.user_data, false),
        ("networkDataBase64", &data.network_data_base64, true),
        ("networkData", &data.network_data, false),
    ];
    for (name, text, is_base64) in texts {
        let Some(text) = text.as_deref().filter(|text| !text.is_empty()) else {
            continue;
        };
        let path = path.child(name);
        let length = if is_base64 {
            decoded_length(text)
        } else {
            Some(text.len())
        };
        match length {
            None => causes.invalid(&path, "is not base64"),
            Some(length) if length > MAX_INLINE => causes.invalid(
                &path,
                format_args!(
                    "has {length} bytes, but inline data may have {MAX_INLINE}: use a Secret"
                ),
            ),
            Some(_) => {}
        }
    }
}

/// The length of what this base64 stands for; `None` where it is malformed.
fn decoded_length(text: &str) -> Option<usize> {
    let symbols: Vec<u8> = text
        .bytes()
        .filter(|byte| !matches!(byte, b'\r' | b'\n'))
        .collect();
    if !symbols.len().is_multiple_of(4) {
        return None;
    }
    let padding = symbols
        .iter()
        .rev()
        .take_while(|byte| **byte == b'=')
        .count();
    let data = symbols.get(..symbols.len() - padding)?;
    let known = |byte: &u8| byte.is_ascii_alphanumeric() || matches!(byte, b'+' | b'/');
    (padding <= 2 && data.iter().all(known)).then(|| symbols.len() / 4 * 3 - padding)
}
