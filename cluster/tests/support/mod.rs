//! A real API server for tests: etcd and kube-apiserver on loopback, without a kubelet.
//!
//! One server per test program, started by the first test that asks for it; each test works in a
//! namespace of its own. `cargo xtask cluster` builds the two programs.

#![allow(
    dead_code,
    unreachable_pub,
    reason = "each test program uses a part of this"
)]

pub mod certificates;
pub mod csi;
mod definitions;
pub mod guest;
pub mod kubelet;
pub mod machines;
pub mod migrations;
pub mod real;
mod requests;
pub mod server;

use std::sync::OnceLock;
use std::sync::atomic::{AtomicU32, Ordering};

use k8s_openapi::api::core::v1::Namespace;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::ObjectMeta;
use kube::Api;
use kube::api::PostParams;

pub use server::Server;

/// Returns this program's server, which runs until the program ends.
pub fn server() -> &'static Server {
    static SERVER: OnceLock<Server> = OnceLock::new();
    SERVER.get_or_init(|| {
        // The kernel kills the children when the thread that started them ends, and a test's
        // thread ends with the test.
        let (sender, receiver) = std::sync::mpsc::channel();
        std::thread::spawn(move || {
            let _ = sender.send(Server::start());
            loop {
                std::thread::park();
            }
        });
        match receiver.recv() {
            Ok(Ok(server)) => server,
            Ok(Err(error)) => panic!("no API server: {error:#}"),
            Err(_) => panic!("no API server: its thread panicked"),
        }
    })
}

/// Makes a namespace for one test; returns its name.
pub async fn namespace(client: &kube::Client) -> String {
    static NUMBER: AtomicU32 = AtomicU32::new(0);
    let name = format!("test-{}", NUMBER.fetch_add(1, Ordering::Relaxed));
    let namespace = Namespace {
        metadata: ObjectMeta {
            name: Some(name.clone()),
            ..ObjectMeta::default()
        },
        ..Namespace::default()
    };
    Api::all(client.clone())
        .create(&PostParams::default(), &namespace)
        .await
        .expect("the namespace is made");
    name
}
