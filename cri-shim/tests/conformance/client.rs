//! The two services of a runtime, and an executor that waits for their answers.

use std::future::Future;
use std::sync::LazyLock;
use std::time::Duration;

use podvisor_cri_messages::{ImageServiceClient, RuntimeServiceClient};
use tonic::transport::{Channel, Endpoint};

use crate::fixture::RUNTIME;
use crate::network::crowd;

/// It owns the connections, so it exists as long as the program.
static EXECUTOR: LazyLock<tokio::runtime::Runtime> = LazyLock::new(|| {
    tokio::runtime::Builder::new_multi_thread()
        .worker_threads(1)
        .enable_all()
        .build()
        .unwrap()
});

/// The timeout of an answer, so that a hanging runtime fails one test and not all of them: if many
/// pods start at the same time, the last one waits for all others.
fn limit() -> Duration {
    let crowd = u32::try_from(crowd()).unwrap_or(u32::MAX);
    Duration::from_secs(240).saturating_add(Duration::from_secs(15).saturating_mul(crowd))
}

static CHANNEL: LazyLock<Channel> = LazyLock::new(|| {
    let address = format!("unix://{}", RUNTIME.socket.display());
    wait(async {
        Endpoint::new(address)
            .unwrap()
            .timeout(limit())
            .connect()
            .await
    })
    .unwrap()
});

/// Waits for an answer.
pub(crate) fn wait<T>(answer: impl Future<Output = T>) -> T {
    EXECUTOR.block_on(answer)
}

pub(crate) fn runtime() -> RuntimeServiceClient<Channel> {
    RuntimeServiceClient::new(CHANNEL.clone()).max_decoding_message_size(64 << 20)
}

pub(crate) fn images() -> ImageServiceClient<Channel> {
    ImageServiceClient::new(CHANNEL.clone())
}

/// Calls the runtime service: `ask!(version(VersionRequest { .. }))` is the response or the status.
macro_rules! ask {
    ($method:ident($request:expr)) => {{
        let mut client = $crate::client::runtime();
        $crate::client::wait(client.$method($request)).map(tonic::Response::into_inner)
    }};
}

/// Like `ask!`, for the image service.
macro_rules! ask_images {
    ($method:ident($request:expr)) => {{
        let mut client = $crate::client::images();
        $crate::client::wait(client.$method($request)).map(tonic::Response::into_inner)
    }};
}

pub(crate) use {ask, ask_images};
