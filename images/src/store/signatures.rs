//! Images under a signature policy: what must be verified before an image enters the store, and
//! what is recorded so that an image in the store can be used without its registry.

use super::database::{self, Record};
use super::lookup::{Lookup, find};
use super::{Inner, PullOptions, Store};
use crate::error::parse_reference;
use crate::registry::{Client, Resolved};
use crate::signature::{Claim, Form};
use crate::{Error, Image, PullEvent, Reference, Result, SignatureError, SignaturePolicy};

/// Maximum number of signatures recorded for an image.
const MAX_SIGNATURES: usize = 32;

impl Store {
    /// Finds an image as [`Store::resolve`] does, but only if `policy` allows it by the signatures
    /// that were verified when it was pulled. An image that is requested by its id may be used
    /// under any of its names.
    ///
    /// # Errors
    /// As [`Store::resolve`]; [`Error::Signature`] if the policy refuses the image.
    pub fn resolve_signed(&self, name: &str, policy: &SignaturePolicy) -> Result<Image> {
        let contents = database::read(&self.inner.layout)?;
        let found = find(&contents, name)?;
        let id = found.id();
        let record = contents.record(&id).ok_or(Error::Damaged { id })?;
        let image = self.inner.image(&contents, id, record)?;
        let names = match found {
            Lookup::Name(name, _) => vec![name],
            Lookup::Id(_) => contents.names_of(&id).map(str::to_owned).collect(),
        };
        let claims = &record.signatures;
        let mut refusal = SignatureError::Unverified { id };
        for name in names {
            match policy.check(&parse_reference(&name)?, claims, claims.len()) {
                Ok(()) => return Ok(image),
                Err(SignatureError::Unsigned { .. }) => {}
                Err(error) => refusal = error,
            }
        }
        Err(refusal.into())
    }
}

impl Inner {
    /// Looks for the signatures that the options' policy requires of an image, attached to its
    /// manifest or its indexes, until there are enough. Returns the verified claims.
    pub(super) async fn verify_signatures(
        &self,
        client: &Client,
        reference: &Reference,
        resolved: &Resolved,
        options: &PullOptions,
    ) -> Result<Vec<Claim>> {
        let Some(policy) = options.signatures.as_deref() else {
            return Ok(Vec::new());
        };
        let (mut claims, mut seen) = (Vec::new(), 0);
        if policy.check(reference, &claims, seen).is_ok() {
            return Ok(claims);
        }
        // The signer of an index vouches for everything that it names.
        let indexes = resolved.indexes.iter().map(|(digest, _)| *digest);
        for manifest in indexes.chain([resolved.digest]) {
            for form in [Form::Simple, Form::Bundle] {
                for signature in client.signatures(&manifest, form).await? {
                    seen += 1;
                    let claim = policy.claim(reference, &signature);
                    claims.extend(claim.filter(|claim| claim.manifest == manifest));
                }
                if policy.check(reference, &claims, seen).is_ok() {
                    for Claim { key, .. } in &claims {
                        options.emit(PullEvent::Verified { key: *key });
                    }
                    return Ok(claims);
                }
            }
        }
        policy.check(reference, &claims, seen)?;
        Ok(claims)
    }
}

/// Adds claims that were verified earlier for the same image, perhaps under another name.
pub(super) fn remember(record: &mut Record, earlier: &Record) {
    for claim in &earlier.signatures {
        if !record.signatures.contains(claim) && record.signatures.len() < MAX_SIGNATURES {
            record.signatures.push(claim.clone());
        }
    }
}
