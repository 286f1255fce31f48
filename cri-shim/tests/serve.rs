//! `podvisor serve` over its socket, as far as that needs no guest.

#[path = "serve/images.rs"]
mod images;
#[path = "serve/pods.rs"]
mod pods;
#[path = "serve/status.rs"]
mod status;
mod support;

use std::collections::HashMap;
use std::fs;
use std::io::{Read as _, Write as _};
use std::net::{TcpListener, TcpStream};
use std::os::unix::fs::PermissionsExt as _;
use std::os::unix::net::UnixDatagram;
use std::process::Command;

use podvisor_cri_messages::*;
use rustix::process::Signal;
use serde_json::json;
use support::OVERLAY_ON_RUN;
use support::cri::Daemon;
use support::image::Image as TestImage;
use support::pod::eventually;
use support::registry::Registry;
use tonic::Code;
use tonic::transport::Channel;

fn pod(name: &str) -> PodSandboxConfig {
    PodSandboxConfig {
        metadata: Some(PodSandboxMetadata {
            name: name.to_owned(),
            uid: format!("uid-{name}"),
            namespace: "default".to_owned(),
            attempt: 0,
        }),
        hostname: name.to_owned(),
        ..PodSandboxConfig::default()
    }
}

fn run(config: PodSandboxConfig) -> RunPodSandboxRequest {
    RunPodSandboxRequest {
        config: Some(config),
        runtime_handler: String::new(),
    }
}

fn spec(image: &str) -> Option<ImageSpec> {
    Some(ImageSpec {
        image: image.to_owned(),
        ..ImageSpec::default()
    })
}

fn namespaces(options: NamespaceOption) -> PodSandboxConfig {
    PodSandboxConfig {
        linux: Some(LinuxPodSandboxConfig {
            security_context: Some(LinuxSandboxSecurityContext {
                namespace_options: Some(options),
                ..LinuxSandboxSecurityContext::default()
            }),
            ..LinuxPodSandboxConfig::default()
        }),
        ..pod("refused")
    }
}

fn http_get(port: u16, path: &str) -> String {
    let mut stream = TcpStream::connect(("127.0.0.1", port)).unwrap();
    let request = format!("GET {path} HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n");
    stream.write_all(request.as_bytes()).unwrap();
    let mut answer = String::new();
    stream.read_to_string(&mut answer).unwrap();
    answer
}

/// Returns the number of network namespaces of the daemon.
fn links(daemon: &Daemon) -> usize {
    fs::read_dir(daemon.path("run/netns")).map_or(0, Iterator::count)
}

/// Adds a CNI plugin that acts on files in its directory: ADD waits until the daemon is gone, DEL
/// until there is `release`, and fails while there is `deny`.
fn add_plugin(daemon: &Daemon) {
    let dir = daemon.path("plugin");
    fs::create_dir(&dir).unwrap();
    let script = format!(
        "#!/bin/sh\n\
         cd {} || exit 1\n\
         cat > /dev/null\n\
         : > $CNI_COMMAND\n\
         case $CNI_COMMAND in\n\
         ADD) while [ ! -e gone ]; do sleep 0.05; done ;;\n\
         DEL) while [ ! -e release ]; do sleep 0.05; done; [ ! -e deny ] && exit 0 ;;\n\
         esac\n\
         echo '{{\"cniVersion\": \"1.0.0\", \"code\": 100, \"msg\": \"denied\"}}'\n\
         exit 1\n",
        dir.display()
    );
    fs::write(dir.join("slow"), script).unwrap();
    fs::set_permissions(dir.join("slow"), fs::Permissions::from_mode(0o755)).unwrap();
    let list = json!({ "cniVersion": "1.0.0", "name": "slow", "plugins": [{ "type": "slow" }] });
    fs::write(daemon.path("net.d/10-slow.conflist"), list.to_string()).unwrap();
}
