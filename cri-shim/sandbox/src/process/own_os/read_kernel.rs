//! A machine of the loader alone, which reads what an image boots.
//!
//! It comes before the first machine of a container. It has the image, read-only, and the file that
//! the loader writes to: no network, no directory, no disk that the guest has written.

use std::sync::{Arc, Mutex};
use std::time::Duration;

use tokio::time::timeout;
use tracing::debug;

use super::super::super::error::SandboxError;
use super::super::super::types::{ReadKernel, RefusalKind};
use super::super::blocking::blocking;
use super::refusals::invalid;
use super::system::OwnOs;
use crate::machine::{
    BootProgram, DiskContents, DiskMove, Machine, MachineDisk, MachineError, MachineExit,
    MachineIdentity, MachinePlan, MachineSize, SerialPort,
};

/// How long the machine may be ended for: a disk that does not answer may keep its threads for
/// good.
const KILL_TIMEOUT: Duration = Duration::from_secs(10);

/// What the loader's last line begins with if it failed.
const ERROR: &str = "podvisor-loader: error: ";

/// A machine that is killed when the call ends that wants it.
#[derive(Debug)]
struct Killed(Arc<Machine>);

impl Drop for Killed {
    fn drop(&mut self) {
        self.0.kill();
    }
}

impl OwnOs {
    /// Runs the loader over an image until it has written what that boots.
    pub(super) async fn read_kernel(&self, read: ReadKernel) -> Result<(), SandboxError> {
        let _turn = self.booting.lock().await;
        if self.running().is_some() {
            let why = "the sandbox's machine runs: read the image's kernel before it boots";
            return Err(SandboxError::refused(RefusalKind::WrongState, why));
        }
        if read.memory > self.memory {
            return Err(invalid(format!(
                "a machine of {} bytes in a sandbox for {} bytes",
                read.memory, self.memory
            )));
        }
        let host = self.host.as_ref().map_err(|why| {
            SandboxError::refused(RefusalKind::Internal, format!("no machine: {why}"))
        })?;
        let host = Arc::clone(host);
        let (port, stream) = SerialPort::new().map_err(MachineError::SerialPort)?;
        // The end of the output is what matters.
        drop(stream);
        let plan = plan(read);
        let built = blocking(move || {
            let machine = plan.build(&host, &port)?.start()?;
            Ok::<_, MachineError>((Killed(Arc::new(machine)), port))
        });
        let (machine, port) = built.await??;
        let exit = timeout(ReadKernel::LIMIT, machine.0.ended()).await;
        let tail = port.tail();
        if timeout(KILL_TIMEOUT, blocking(move || drop(machine)))
            .await
            .is_err()
        {
            return Err(refused(
                "its machine cannot be ended: a disk does not answer",
            ));
        }
        debug!(?exit, tail, "the loader has ended");
        match exit {
            Ok(MachineExit::PoweredOff) => match tail.lines().find_map(|l| l.strip_prefix(ERROR)) {
                None => Ok(()),
                // It finds the same in this image another time.
                Some(why) => Err(refused_as(RefusalKind::Image, why)),
            },
            Ok(exit) => Err(refused(&format!("its machine {exit}"))),
            Err(_) => Err(refused(&format!(
                "it did not end within {} s",
                ReadKernel::LIMIT.as_secs()
            ))),
        }
    }
}

fn refused(why: &str) -> SandboxError {
    refused_as(RefusalKind::Internal, why)
}

fn refused_as(kind: RefusalKind, why: &str) -> SandboxError {
    let message = format!("the loader did not read the image's kernel: {why}");
    SandboxError::refused(kind, message)
}

fn plan(read: ReadKernel) -> MachinePlan {
    let disk = |file, is_read_only, serial: &str| MachineDisk {
        contents: DiskContents::Raw { file, is_read_only },
        serial: serial.to_owned(),
        moves: DiskMove::default(),
    };
    MachinePlan {
        kernel: read.kernel,
        program: BootProgram::Kernel,
        initramfs: Some(read.initramfs),
        cmdline: read.cmdline,
        uuid: None,
        identity: MachineIdentity::default(),
        size: MachineSize::new(1, 1, read.memory, 0, 0),
        disks: vec![
            disk(read.image, true, ReadKernel::IMAGE),
            disk(read.frame, false, ReadKernel::FRAME),
        ],
        nics: Vec::new(),
        shares: Vec::new(),
        plugged: Mutex::default(),
    }
}
