//! KubeVirt's own client, `virtctl`, against the API: what its commands do, and what they print.
//!
//! `cargo xtask cluster` builds it beside the API server.

#[path = "virtctl/commands.rs"]
mod commands;
#[path = "virtctl/disks.rs"]
mod disks;
#[path = "virtctl/dumps.rs"]
mod dumps;
#[path = "virtctl/exports.rs"]
mod exports;
#[path = "virtctl/manifests.rs"]
mod manifests;

use std::io::{Read as _, Write as _};
use std::path::PathBuf;
use std::process::{Child, ChildStdin, Command, ExitStatus, Stdio};
use std::sync::{Arc, Mutex};

use kube::{
    Api, Client,
    api::{DynamicObject, PostParams},
};
use podvisor_node_api::messages::VmName;

use super::nodes::{self, eventually};
use super::security::user;
use super::support::{self, machines::StandIn, server};
use super::{api_of, migrations, served};
use support::kubelet::Kubelet;

/// How many seconds a command may take, as `timeout` reads it.
const PATIENCE: &str = "120";

/// A user's client, with a namespace of its own.
#[derive(Clone)]
struct Virtctl {
    kubeconfig: PathBuf,
    namespace: String,
}

/// What a command has printed, to both ends, and whether it says that it succeeded.
#[derive(Debug)]
struct Said {
    succeeded: bool,
    text: String,
}

/// A command, and a part of what it prints if it succeeds, or of why it does not.
type Row<'a> = (&'a str, Result<&'a str, &'a str>);

impl Virtctl {
    /// Of a user who has the rights of `edit` in a namespace of its own.
    async fn new(admin: &Client) -> Self {
        let namespace = support::namespace(admin).await;
        let name = format!("virtctl-{namespace}");
        let roles = [
            "system:aggregate-to-edit",
            "system:aggregate-to-view",
            "podvisor-vm-edit",
        ];
        user(&name, &namespace, &roles).await;
        Self {
            kubeconfig: served().user_kubeconfig(&name, &namespace),
            namespace,
        }
    }

    /// Of who may do everything, in the same namespace.
    fn of_admin(&self) -> Self {
        Self {
            kubeconfig: served().admin_kubeconfig(&self.namespace),
            namespace: self.namespace.clone(),
        }
    }

    /// A command that is killed when it takes too long.
    fn command(&self, arguments: &str) -> Command {
        let mut command = Command::new("timeout");
        command.args(["--signal=KILL", PATIENCE]).arg(program());
        self.complete(command, arguments)
    }

    /// Adds a command's arguments, which have no spaces in them, and its surroundings.
    fn complete(&self, mut command: Command, arguments: &str) -> Command {
        command
            .args(arguments.split_whitespace())
            .env("KUBECONFIG", &self.kubeconfig)
            .env("HOME", "/nonexistent")
            .env("USER", "tester")
            .stdin(Stdio::null());
        command
    }

    async fn run(&self, arguments: &str) -> Said {
        self.run_with(arguments, |_| {}).await
    }

    /// Runs a command whose surroundings are changed.
    async fn run_with(&self, arguments: &str, change: impl FnOnce(&mut Command)) -> Said {
        let mut command = self.command(arguments);
        change(&mut command);
        let output = tokio::task::spawn_blocking(move || command.output());
        let output = output.await.expect("no panic").expect("virtctl starts");
        let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
        Said {
            succeeded: output.status.success(),
            text: text(&output.stdout) + &text(&output.stderr),
        }
    }

    /// Runs commands one after the other, and compares what they print.
    async fn all(&self, rows: &[Row<'_>]) {
        let mut wrong = Vec::new();
        for (arguments, expected) in rows {
            let said = self.run(arguments).await;
            let (Ok(part) | Err(part)) = expected;
            let is_right = said.succeeded == expected.is_ok() && said.text.contains(part);
            // Where a command fails, it asks for the server's version, and says what is odd there.
            let is_odd = said.text.starts_with("unknown\n")
                || said.text.contains("different from the KubeVirt version");
            if !is_right || is_odd {
                wrong.push(format!(
                    "virtctl {arguments}: {said:?}, and not {expected:?}"
                ));
            }
        }
        assert!(wrong.is_empty(), "{}", wrong.join("\n"));
    }

    /// Begins a command that talks. It is a child of this process, killed with its [`Talk`].
    fn begin(&self, arguments: &str) -> Talk {
        let mut command = self.complete(Command::new(program()), arguments);
        command.stdin(Stdio::piped()).stdout(Stdio::piped());
        let mut child = command.spawn().expect("virtctl starts");
        let mut output = child.stdout.take().expect("a pipe");
        let heard = Arc::new(Mutex::new(Vec::new()));
        let hears = Arc::clone(&heard);
        std::thread::spawn(move || {
            let mut bytes = [0; 4096];
            while let Ok(count @ 1..) = output.read(&mut bytes) {
                hears.lock().expect("no panic").extend(&bytes[..count]);
            }
        });
        Talk {
            input: child.stdin.take(),
            child,
            heard,
        }
    }
}

fn program() -> PathBuf {
    let program = server::bin().join("virtctl");
    assert!(
        program.is_file(),
        "{} is missing: `cargo xtask cluster` builds it",
        program.display()
    );
    program
}

/// A command that runs, and its ends.
struct Talk {
    child: Child,
    input: Option<ChildStdin>,
    heard: Arc<Mutex<Vec<u8>>>,
}

impl Talk {
    fn say(&mut self, bytes: &[u8]) {
        let input = self.input.as_mut().expect("it is open");
        input.write_all(bytes).expect("virtctl reads");
        input.flush().expect("virtctl reads");
    }

    /// Waits until it has printed exactly this, and forgets it.
    async fn hears(&self, expected: &str) {
        eventually(&format!("it prints {expected:?}"), async || {
            let mut heard = self.heard.lock().expect("no panic");
            (*heard == expected.as_bytes()).then(|| heard.clear())
        })
        .await;
    }

    async fn ends(mut self) -> ExitStatus {
        let look = async || self.child.try_wait().expect("it is a child");
        eventually("virtctl ends", look).await
    }
}

impl Drop for Talk {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// A VM that runs on a node, with the controller and all of its parts.
struct Scene {
    admin: Client,
    virtctl: Virtctl,
    node: StandIn,
    vms: Api<DynamicObject>,
    vmis: Api<DynamicObject>,
    _controller: migrations::Task,
    _kubelet: Kubelet,
}

impl Scene {
    async fn new(node: &str) -> Self {
        let admin = served().admin();
        let virtctl = Virtctl::new(&admin).await;
        let namespace = &virtctl.namespace;
        Self {
            node: nodes::serve(node).await,
            vms: api_of(&admin, namespace, "VirtualMachine"),
            vmis: api_of(&admin, namespace, "VirtualMachineInstance"),
            _controller: migrations::start_controller(namespace),
            _kubelet: Kubelet::play_on(admin.clone(), namespace, &[node]),
            admin,
            virtctl,
        }
    }

    async fn make(&self, vm: &DynamicObject) {
        let params = PostParams::default();
        self.vms.create(&params, vm).await.unwrap();
    }

    /// Waits until an instance runs, other than `before`; returns its name on the node.
    async fn runs(&self, name: &str, before: Option<&VmName>) -> VmName {
        let vmi = eventually(&format!("{name} runs"), async || {
            let vmi = self.vmis.get_opt(name).await.unwrap()?;
            let is_new = vmi.metadata.uid.as_ref() != before.map(|before| &before.uid);
            (is_new && vmi.data["status"]["phase"] == "Running").then_some(vmi)
        })
        .await;
        let vm = VmName::new(&self.virtctl.namespace, name, vmi.metadata.uid.unwrap());
        self.node.start(&vm, Some(support::machines::guest()));
        vm
    }

    async fn is_gone(&self, name: &str) {
        eventually(&format!("{name} is gone"), async || {
            let vmi = self.vmis.get_opt(name).await.unwrap();
            vmi.is_none().then_some(())
        })
        .await;
    }
}
