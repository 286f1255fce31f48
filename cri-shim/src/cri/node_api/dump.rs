//! Dumps of a VM's memory, in claims that other pods keep. The pod's process writes them; the node
//! makes the file, and names it when it is whole. Who wants one asks again until it is there, so
//! that neither a daemon that is replaced nor one that is killed loses it.

use std::time::Duration;

use podvisor_node_api::messages::{DumpMemoryAnswer, DumpMemoryRequest, DumpState};
use tonic::Status;
use tracing::{info, warn};

use super::control::status;
use super::plug::named;
use crate::blocking::apart;
use crate::cri::error::CriError;
use crate::cri::node::Node;
use crate::cri::vm::{DumpDirectory, name_of};
use crate::sandbox::{DumpInfo, DumpMachine, DumpState as Written};

/// How long a guest may stand still unless the request says.
const DEFAULT_LIMIT: Duration = Duration::from_secs(600);

impl Node {
    /// Begins to dump a VM's memory, or says how far that is.
    pub(super) async fn dump_memory_of_vm(
        &self,
        request: DumpMemoryRequest,
    ) -> Result<DumpMemoryAnswer, Status> {
        let vm = named(request.vm)?;
        let name = request.file;
        DumpDirectory::check_name(&name)?;
        let (pod, machine) = self.running_vm(&vm).await?;
        let vm = name_of(&pod);
        let (attachment, keeper) = self.attachment(&vm, &request.pod_uid)?;
        let config = keeper.with_record(|record| record.config.clone());
        let client = pod.client()?;
        let latest = client.dump(&machine.id).await.map_err(status)?;
        let latest = latest.filter(|latest| latest.name == name);
        // A file server that does not answer must not hold up the node.
        let at = name.clone();
        let now = apart("vm-dump", move || {
            let dumps = attachment.open_for_dumps(&config)?;
            let next = next(latest, &at, &dumps)?;
            Ok::<_, CriError>((next, dumps))
        });
        let (next, dumps) = now.await.map_err(CriError::host("write to the claim"))??;
        let file = match next {
            Next::Answer(answer) => return Ok(answer),
            Next::Begin(file) => file,
        };
        let limit = match request.limit_seconds {
            0 => DEFAULT_LIMIT,
            seconds => Duration::from_secs(seconds.into()),
        };
        let dump = DumpMachine {
            name: name.clone(),
            file,
            limit,
        };
        if let Err(error) = client.dump_machine(&machine.id, dump).await {
            let removed = apart("vm-dump", move || dumps.discard(&name));
            if let Err(error) = removed.await {
                warn!(%error, "the file of a dump is not removed");
            }
            return Err(status(error));
        }
        info!(pod = pod.id, "the guest's memory is dumped");
        Ok(answer(DumpState::Writing))
    }
}

/// What comes next of a dump.
enum Next {
    Answer(DumpMemoryAnswer),
    /// It has not begun, and this is its file.
    Begin(std::fs::File),
}

/// Decides by what the pod's process knows of the dump, and by what is in the claim.
fn next(latest: Option<DumpInfo>, name: &str, dumps: &DumpDirectory) -> Result<Next, CriError> {
    let Some(latest) = latest else {
        return Ok(match dumps.has(name)? {
            // Another one was written since.
            true => Next::Answer(answer(DumpState::Done)),
            false => Next::Begin(dumps.begin(name)?),
        });
    };
    let state = match latest.state {
        Written::Writing => DumpState::Writing,
        Written::Done => {
            dumps.finish(name)?;
            DumpState::Done
        }
        Written::Failed => {
            dumps.discard(name);
            DumpState::Failed
        }
        // The process is newer than this daemon.
        _ => DumpState::Unknown,
    };
    Ok(Next::Answer(DumpMemoryAnswer {
        done: latest.done,
        total: latest.total,
        message: latest.reason,
        ..answer(state)
    }))
}

fn answer(state: DumpState) -> DumpMemoryAnswer {
    DumpMemoryAnswer {
        state: state.into(),
        ..DumpMemoryAnswer::default()
    }
}

#[cfg(test)]
mod tests {
    use std::fs;

    use super::*;

    const NAME: &str = "web-data-1.memory.dump";

    fn info(state: Written) -> Option<DumpInfo> {
        Some(DumpInfo {
            name: NAME.to_owned(),
            state,
            reason: "no room".to_owned(),
            done: 3,
            total: 4,
        })
    }

    #[test]
    fn a_dump_is_begun_once_and_done_when_it_has_its_name() {
        let dir = tempfile::tempdir().unwrap();
        let dumps = DumpDirectory::open(dir.path(), None).unwrap();
        let next = |latest| match next(latest, NAME, &dumps).unwrap() {
            Next::Begin(file) => Err(file),
            Next::Answer(answer) => Ok((answer.state(), answer.done, answer.message)),
        };
        let none = String::new();
        let file = next(None).unwrap_err();
        let reason = || "no room".to_owned();
        assert_eq!(
            next(info(Written::Writing)).unwrap(),
            (DumpState::Writing, 3, reason())
        );
        assert!(!dir.path().join(NAME).exists());
        // The daemon that began it is gone; the dump is whole.
        drop(file);
        let (state, ..) = next(info(Written::Done)).unwrap();
        assert_eq!(state, DumpState::Done);
        assert!(dir.path().join(NAME).exists());
        assert_eq!(next(info(Written::Done)).unwrap().0, DumpState::Done);
        // Another one was written since.
        assert_eq!(next(None).unwrap(), (DumpState::Done, 0, none));
    }

    #[test]
    fn nothing_is_left_of_a_dump_that_failed() {
        let dir = tempfile::tempdir().unwrap();
        let dumps = DumpDirectory::open(dir.path(), None).unwrap();
        drop(dumps.begin(NAME).unwrap());
        for _ in 0..2 {
            let Next::Answer(answer) = next(info(Written::Failed), NAME, &dumps).unwrap() else {
                panic!("it is begun anew");
            };
            assert_eq!(answer.state(), DumpState::Failed);
            assert_eq!(answer.message, "no room");
            assert_eq!(fs::read_dir(dir.path()).unwrap().count(), 0);
        }
    }
}
