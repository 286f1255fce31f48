//! The shape that all objects share: camel case, every field optional, unset fields not written.

use std::collections::BTreeMap;

use serde_json::Value;

/// Defines a part of an object as Kubernetes' JSON has it.
///
/// Every field may be missing: that a field is required is a rule of validation, so that all
/// that is wrong with an object is told at once.
macro_rules! object {
    ($(
        $(#[$meta:meta])*
        pub struct $name:ident {
            $( $(#[$field_meta:meta])* pub $field:ident : $kind:ty, )*
        }
    )*) => { $(
        $(#[$meta])*
        #[derive(Debug, Clone, Default, PartialEq, serde::Serialize, serde::Deserialize)]
        #[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
        #[serde(rename_all = "camelCase")]
        pub struct $name {
            $(
                $(#[$field_meta])*
                #[serde(default, skip_serializing_if = "crate::object::Unset::is_unset")]
                pub $field: $kind,
            )*
        }

        impl crate::object::Unset for $name {
            fn is_unset(&self) -> bool {
                *self == Self::default()
            }
        }
    )* };
}

/// Values that are left out of an object's JSON.
pub(crate) trait Unset {
    /// Whether this is what a missing field is read as.
    fn is_unset(&self) -> bool;
}

impl<T> Unset for Option<T> {
    fn is_unset(&self) -> bool {
        self.is_none()
    }
}

impl<T> Unset for Vec<T> {
    fn is_unset(&self) -> bool {
        self.is_empty()
    }
}

impl<K, V> Unset for BTreeMap<K, V> {
    fn is_unset(&self) -> bool {
        self.is_empty()
    }
}

impl Unset for String {
    fn is_unset(&self) -> bool {
        self.is_empty()
    }
}

impl Unset for i32 {
    fn is_unset(&self) -> bool {
        *self == 0
    }
}

impl Unset for bool {
    fn is_unset(&self) -> bool {
        !self
    }
}

impl Unset for i64 {
    fn is_unset(&self) -> bool {
        *self == 0
    }
}

impl Unset for Value {
    fn is_unset(&self) -> bool {
        self.is_null()
    }
}
