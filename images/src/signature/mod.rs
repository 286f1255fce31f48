//! Signatures of images, as `cosign` and the tools of `containers/image` make them, checked against
//! keys and a policy.
//!
//! A registry stores an image's signatures along with it; `registry` fetches them as [`Attached`].
//! A [`SignaturePolicy`] says what an image of a certain name needs; [`SignaturePolicy::check`]
//! decides on [`Claim`]s, each of which is the content of one signature by a trusted key.
//! Everything but the keys and the policy is untrusted. Nothing here knows about the network or the
//! store.

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
