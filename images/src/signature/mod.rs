//! Signatures of images, as `cosign` and the tools of `containers/image` make them, checked against
//! keys and a policy.
//!
//! A registry keeps an image's signatures beside it; `registry` fetches what it has, here called
//! [`Attached`]. A [`SignaturePolicy`] says what an image of some name needs;
//! [`SignaturePolicy::check`] decides on [`Claim`]s, each of which is what one signature by a
//! trusted key says. All but the keys and the policy is hostile. Nothing here knows the network or
//! the store.

mod attached;
mod bundle;
mod claim;
mod error;
mod key;
mod policy;
mod scope;
mod simple;

pub(crate) use attached::{Attached, Form, Pointer, bundle_of, bundles_of, simple_of, tag_of};
pub(crate) use claim::Claim;
pub use error::{PolicyError, SignatureError};
pub use policy::SignaturePolicy;

#[cfg(test)]
mod tests;
