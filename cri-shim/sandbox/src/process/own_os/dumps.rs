//! What is known of dumps of a machine's memory.

use tokio::sync::watch;

use super::super::super::error::SandboxError;
use super::super::super::types::{DumpInfo, DumpState, RefusalKind};

/// The latest dump of a machine.
#[derive(Debug, Default)]
pub(super) struct Dumps(watch::Sender<Option<DumpInfo>>);

impl Dumps {
    /// Returns the latest dump, if there was one.
    pub(super) fn latest(&self) -> Option<DumpInfo> {
        self.0.borrow().clone()
    }

    /// Waits until no dump is being written.
    pub(super) async fn ended(&self) -> Option<DumpInfo> {
        let mut latest = self.0.subscribe();
        let is_over = |info: &DumpInfo| info.state != DumpState::Writing;
        let ended = latest.wait_for(|info| info.as_ref().is_none_or(is_over));
        let ended = ended.await;
        ended.ok().and_then(|info| info.clone())
    }

    /// Begins one; `false` if it is the one that is written already.
    pub(super) fn begin(&self, name: &str) -> Result<bool, SandboxError> {
        let mut result = Ok(true);
        self.0.send_if_modified(|latest| {
            match latest {
                Some(info) if info.state == DumpState::Writing && info.name == name => {
                    result = Ok(false);
                    return false;
                }
                Some(info) if info.state == DumpState::Writing => {
                    result = Err(SandboxError::refused(
                        RefusalKind::WrongState,
                        format!(
                            "the dump {:?} is being written: wait until it is done",
                            info.name
                        ),
                    ));
                    return false;
                }
                _ => {}
            }
            *latest = Some(DumpInfo {
                name: name.to_owned(),
                state: DumpState::Writing,
                reason: String::new(),
                done: 0,
                total: 0,
            });
            true
        });
        result
    }

    /// Changes what is known of it.
    pub(super) fn change(&self, change: impl FnOnce(&mut DumpInfo)) {
        self.0.send_modify(|latest| {
            if let Some(latest) = latest {
                change(latest);
            }
        });
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn there_is_one_dump_at_a_time_and_the_latest_is_known() {
        let dumps = Dumps::default();
        assert_eq!(dumps.latest(), None);
        assert_eq!(dumps.ended().await, None);
        assert!(dumps.begin("one").unwrap());
        assert!(!dumps.begin("one").unwrap());
        let refused = dumps.begin("two").unwrap_err().to_string();
        assert!(refused.contains("\"one\""), "{refused}");
        let end = dumps.ended();
        dumps.change(|info| {
            info.state = DumpState::Failed;
            info.reason = "no room".to_owned();
        });
        let ended = end.await.unwrap();
        assert_eq!((&*ended.name, &*ended.reason), ("one", "no room"));
        assert!(dumps.begin("one").unwrap(), "it is tried again");
    }
}
