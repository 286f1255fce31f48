//! What `podvisor serve` answers, as who asked the node gets it.

use std::time::Duration;

use tokio::time::timeout;

use super::machines::Refusal;
use crate::status::Failure;

/// How long `podvisor serve` may take to carry out a request: the guest's agent may be slow.
const LIMIT: Duration = Duration::from_secs(45);

/// Waits for an answer of `podvisor serve` for a while.
pub(super) async fn limited<T>(
    asked: impl Future<Output = Result<T, Refusal>>,
) -> Result<T, Refusal> {
    let answer = timeout(LIMIT, asked).await;
    answer.unwrap_or_else(|_| {
        let seconds = LIMIT.as_secs();
        Err(Refusal::Failed(format!("no answer within {seconds} s")))
    })
}

/// What is answered to who asked for what was refused.
pub(super) fn failure(refusal: &Refusal) -> Failure {
    match refusal {
        Refusal::NotFound => Failure::not_found("virtual machine", "on this node"),
        Refusal::State(why) => Failure::conflict(why.clone()),
        Refusal::TakenOver => Failure::conflict(refusal.to_string()),
        Refusal::Invalid(_) | Refusal::Unsupported(_) => Failure::bad_request(refusal.to_string()),
        Refusal::Failed(_) => Failure::internal(refusal.to_string()),
    }
}
