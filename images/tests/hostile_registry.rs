//! Registries that lie, stall and disconnect. Whatever they do, the store is unchanged afterwards.

#[path = "hostile_registry/breaks.rs"]
mod breaks;
#[path = "hostile_registry/content.rs"]
mod content;
#[path = "hostile_registry/credentials.rs"]
mod credentials;
#[path = "hostile_registry/kinds.rs"]
mod kinds;
mod support;

use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use podvisor_images::{Digest, Prune, PullEvent, Store, StoreOptions};
use serde_json::json;
use support::faulty::honest;
use support::image::{Layer, Packing};
use support::{Body, Faulty, Reply, TestImage, TestStore, explain, options, registries};

/// Pulls and returns the error's message; nothing may be left in the store.
async fn refused(server: &Faulty, test: &TestStore) -> String {
    let error = test
        .pull(&server.name())
        .await
        .expect_err("the image must be refused");
    assert_eq!(test.files(), [""; 0], "{error:?}");
    explain(&error)
}

fn is_blob(path: &str, blob: &[u8]) -> bool {
    path.ends_with(&Digest::of(blob).to_string())
}
