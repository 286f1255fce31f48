//! What QEMU's guest agent is asked. Its answers are the guest's word, and bounded where they are
//! read.

use std::sync::Arc;
use std::time::Duration;

use podvisor_node_api::messages::{
    AgentExecAnswer, AgentExecRequest, FreezeRequest, GuestFileSystem, GuestInfo, GuestInterface,
    GuestOs, GuestUser, VmName,
};
use tonic::Status;

use super::control::{status, wrong_state};
use crate::cri::node::{Container, Node};
use crate::sandbox::guest::{GuestInfo as AgentsInfo, Program, ProgramExit};
use crate::sandbox::{GuestAgentCall, RefusalKind, SandboxClient, SandboxError};

/// How long a program in a guest may take, unless the request says.
const EXEC_TIMEOUT: Duration = Duration::from_secs(60);

/// The longest that a request may say: an hour.
const MAX_EXEC_TIMEOUT: u32 = 60 * 60;

/// Most words of a command line.
const MAX_WORDS: usize = 1024;

/// What is added to a signal's number to make an exit code of it.
const SIGNALLED: i32 = 128;

/// Without an agent, a call is right and the guest is not.
fn agent_status(error: SandboxError) -> Status {
    let no_agent = error.kind() == Some(RefusalKind::NoAgent);
    let status = status(error);
    match no_agent {
        true => Status::failed_precondition(status.message().to_owned()),
        false => status,
    }
}

impl Node {
    /// Returns the sandbox and the container of a VM whose agent can be asked.
    async fn asked(&self, vm: &VmName) -> Result<(SandboxClient, Arc<Container>), Status> {
        let (pod, container) = self.running_vm(vm).await?;
        let client = pod.client()?;
        match client.is_paused().await.map_err(status)? {
            true => Err(wrong_state(vm, "is paused")),
            false => Ok((client, container)),
        }
    }

    /// Returns what a guest says of itself.
    pub(super) async fn guest_info_of_vm(&self, vm: &VmName) -> Result<GuestInfo, Status> {
        let (client, container) = self.asked(vm).await?;
        let info = client.guest_info(&container.id).await;
        Ok(shown(info.map_err(agent_status)?))
    }

    /// Freezes a guest's file systems, for so long at most.
    pub(super) async fn freeze_vm(&self, request: FreezeRequest) -> Result<(), Status> {
        let (client, container) = self.asked(&named(request.vm)?).await?;
        let longest = match request.timeout_seconds {
            0 => GuestAgentCall::LONGEST_FREEZE,
            seconds => Duration::from_secs(seconds.into()).min(GuestAgentCall::LONGEST_FREEZE),
        };
        let frozen = client.freeze_guest(&container.id, longest).await;
        frozen.map_err(agent_status).map(drop)
    }

    /// Thaws a guest's file systems.
    pub(super) async fn thaw_vm(&self, vm: &VmName) -> Result<(), Status> {
        let (client, container) = self.asked(vm).await?;
        let thawed = client.thaw_guest(&container.id).await;
        thawed.map_err(agent_status).map(drop)
    }

    /// Runs a program in a guest.
    pub(super) async fn exec_in_vm(
        &self,
        request: AgentExecRequest,
    ) -> Result<AgentExecAnswer, Status> {
        let program = program(request.command)?;
        let (client, container) = self.asked(&named(request.vm)?).await?;
        let limit = match request.timeout_seconds {
            0 => EXEC_TIMEOUT,
            seconds => Duration::from_secs(seconds.min(MAX_EXEC_TIMEOUT).into()),
        };
        let end = client.run_in_guest(&container.id, program, limit).await;
        let end = end.map_err(agent_status)?;
        Ok(AgentExecAnswer {
            exit_code: match end.exit {
                ProgramExit::Code(code) => code,
                ProgramExit::Signal(signal) => signal.saturating_add(SIGNALLED),
            },
            stdout: end.stdout.into(),
            stderr: end.stderr.into(),
            is_truncated: end.is_truncated,
        })
    }
}

fn named(vm: Option<VmName>) -> Result<VmName, Status> {
    vm.ok_or_else(|| Status::invalid_argument("vm: the request names no virtual machine"))
}

/// Returns a request's command as a program.
fn program(command: Vec<String>) -> Result<Program, Status> {
    if command.len() > MAX_WORDS {
        return Err(Status::invalid_argument(format!(
            "command: {} words, but at most {MAX_WORDS}",
            command.len()
        )));
    }
    let mut words = command.into_iter();
    match words.next().filter(|path| !path.is_empty()) {
        Some(path) => Ok(Program {
            path,
            arguments: words.collect(),
            environment: Vec::new(),
            input: Vec::new(),
        }),
        None => Err(Status::invalid_argument("command: it names no program")),
    }
}

/// What an agent says, in the words of the calls.
fn shown(info: AgentsInfo) -> GuestInfo {
    let os = info.os;
    GuestInfo {
        agent_version: info.agent_version,
        os: Some(GuestOs {
            id: os.id,
            name: os.name,
            pretty_name: os.pretty_name,
            version: os.version,
            version_id: os.version_id,
            kernel_release: os.kernel_release,
            kernel_version: os.kernel_version,
            machine: os.machine,
        }),
        host_name: info.host_name,
        time_zone: info.time_zone,
        time_zone_offset: info.time_offset,
        users: info
            .users
            .into_iter()
            .map(|user| GuestUser {
                name: user.name,
                domain: user.domain,
                login_time: user.login_time,
            })
            .collect(),
        file_systems: info
            .file_systems
            .into_iter()
            .map(|one| GuestFileSystem {
                disk: one.device,
                mount_point: one.mount_point,
                kind: one.kind,
                total_bytes: one.total.unwrap_or(0),
                used_bytes: one.used.unwrap_or(0),
            })
            .collect(),
        interfaces: info
            .interfaces
            .into_iter()
            .map(|one| GuestInterface {
                name: one.name,
                mac: one.mac,
                addresses: one
                    .addresses
                    .iter()
                    .map(|address| format!("{}/{}", address.address, address.prefix))
                    .collect(),
            })
            .collect(),
        freeze_status: match info.is_frozen {
            true => "frozen".to_owned(),
            false => "thawed".to_owned(),
        },
    }
}

#[cfg(test)]
mod tests {
    use tonic::Code;

    use super::*;
    use crate::sandbox::guest::{GuestAddress, GuestInterface as AgentsInterface};

    #[test]
    fn what_the_agent_says_is_passed_on() {
        let info = shown(AgentsInfo {
            host_name: "web".to_owned(),
            is_frozen: true,
            interfaces: vec![AgentsInterface {
                name: "eth0".to_owned(),
                mac: "02:00:00:00:00:aa".to_owned(),
                addresses: vec![GuestAddress {
                    address: "10.0.0.2".to_owned(),
                    prefix: 24,
                }],
            }],
            ..AgentsInfo::default()
        });
        assert_eq!(info.host_name, "web");
        assert_eq!(info.freeze_status, "frozen");
        assert_eq!(info.interfaces[0].addresses, ["10.0.0.2/24"]);
    }

    #[test]
    fn a_command_names_a_program_and_is_bounded() {
        let words = |words: &[&str]| words.iter().map(|word| (*word).to_owned()).collect();
        let made = program(words(&["/bin/ls", "-l"])).unwrap();
        assert_eq!(
            (made.path.as_str(), made.arguments),
            ("/bin/ls", words(&["-l"]))
        );
        for refused in [words(&[]), words(&[""]), vec!["x".to_owned(); 1025]] {
            let code = program(refused).unwrap_err().code();
            assert_eq!(code, Code::InvalidArgument);
        }
    }

    #[test]
    fn a_guest_without_an_agent_is_in_the_wrong_state() {
        let error = SandboxError::NoAgent {
            request: "ask the guest's agent",
            advice: "",
        };
        assert_eq!(agent_status(error).code(), Code::FailedPrecondition);
    }
}
