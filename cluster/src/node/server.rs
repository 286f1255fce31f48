//! What API servers ask of the node: `/v1/NAMESPACE/NAME/UID/…`.
//!
//! | path | verb | does |
//! | --- | --- | --- |
//! | `pause`, `unpause`, `softreboot`, `reset`, `freeze`, `unfreeze` | PUT | an action |
//! | `guestosinfo`, `userlist`, `filesystemlist` | GET | asks the guest's agent |
//! | `console`, `portforward/PORT/PROTOCOL`, `vsock/PORT` | GET | a WebSocket |
//!
//! Whether a user may do that was decided before: who asks is an API server, by its certificate.
//! Migrations and changes have files of their own.

use std::sync::Arc;

use http::{Method, Request, StatusCode};
use hyper::body::Incoming;
use podvisor_node_api::messages::VmName;
use serde::Deserialize;

use super::{
    answers::{failure, limited},
    changes, guest,
    identity::Trust,
    machines::{Action, Machines, Refusal, Stream},
    migration::{self, Migrations},
    report::Events,
    stream::Handshake,
};
use crate::{
    contact,
    https::{self, Answer, Peer},
    status::Failure,
};

/// The server's state.
pub(super) struct Server {
    machines: Machines,
    events: Events,
    migrations: Migrations,
    trust: Arc<Trust>,
}

impl Server {
    pub(super) fn new(
        machines: Machines,
        events: Events,
        migrations: Migrations,
        trust: Arc<Trust>,
    ) -> Self {
        Self {
            machines,
            events,
            migrations,
            trust,
        }
    }
}

pub(super) async fn handle(request: Request<Incoming>, peer: Peer, server: Arc<Server>) -> Answer {
    let migration = migration::Asked::read(request.method(), request.uri().path());
    let change = changes::Asked::read(request.method(), request.uri().path());
    let answer = match migration {
        None if change.is_some() && server.trust.is(&peer, contact::CONTROLLER) => match change {
            Some(asked) => changes::answer(request, asked, &server.machines).await,
            None => Err(Failure::unauthorized()),
        },
        // By the certificate that it looks at itself.
        Some(asked) if asked.is_of_a_node() => {
            server.migrations.answer(request, asked, &peer).await
        }
        Some(asked) if server.trust.is(&peer, contact::CONTROLLER) => {
            server.migrations.answer(request, asked, &peer).await
        }
        // The certificate may be one of the authority, but so are those of the webhooks.
        None if server.trust.is(&peer, contact::API) => answer(request, &server).await,
        _ => Err(Failure::unauthorized()),
    };
    match answer {
        Ok(answer) => answer,
        Err(failure) => failure.answer(),
    }
}

/// What is asked of a VM.
#[derive(Debug, Clone, PartialEq, Eq)]
enum Asked {
    Action(&'static str),
    Fact(&'static str),
    Stream(Stream),
}

fn parse(method: &Method, path: &str) -> Option<(VmName, Asked)> {
    let mut steps = path.strip_prefix("/v1/")?.split('/');
    let mut next = || steps.next().filter(|step| !step.is_empty());
    let key = VmName::new(next()?, next()?, next()?);
    let rest: Vec<&str> = steps.collect();
    let asked = match (method, rest.as_slice()) {
        (&Method::PUT, ["pause"]) => Asked::Action("pause"),
        (&Method::PUT, ["unpause"]) => Asked::Action("unpause"),
        (&Method::PUT, ["softreboot"]) => Asked::Action("softreboot"),
        (&Method::PUT, ["reset"]) => Asked::Action("reset"),
        (&Method::PUT, ["freeze"]) => Asked::Action("freeze"),
        (&Method::PUT, ["unfreeze"]) => Asked::Action("unfreeze"),
        (&Method::GET, ["guestosinfo"]) => Asked::Fact("guestosinfo"),
        (&Method::GET, ["userlist"]) => Asked::Fact("userlist"),
        (&Method::GET, ["filesystemlist"]) => Asked::Fact("filesystemlist"),
        (&Method::GET, ["console"]) => Asked::Stream(Stream::Console),
        (&Method::GET, ["vsock", port]) => Asked::Stream(Stream::Vsock(port.parse().ok()?)),
        (&Method::GET, ["portforward", port, "tcp"]) => {
            Asked::Stream(Stream::Tcp(port.parse().ok()?))
        }
        (&Method::GET, ["portforward", port, "udp"]) => {
            Asked::Stream(Stream::Udp(port.parse().ok()?))
        }
        _ => return None,
    };
    Some((key, asked))
}

async fn answer(request: Request<Incoming>, server: &Server) -> Result<Answer, Failure> {
    let path = request.uri().path();
    let (vm, asked) = parse(request.method(), path).ok_or_else(|| Failure::not_found_path(path))?;
    match asked {
        Asked::Action(name) => {
            let body = match https::read_body(request.into_body()).await {
                Ok(body) => body,
                Err(answer) => return Ok(answer),
            };
            act(server, &vm, name, &body).await
        }
        Asked::Fact(name) => {
            let info = limited(server.machines.guest(&vm)).await;
            let info = info.map_err(|refusal| failure(&refusal))?;
            let value = match name {
                "userlist" => guest::user_list(&info),
                "filesystemlist" => guest::filesystem_list(&info),
                _ => guest::document(&info),
            };
            Ok(https::json(StatusCode::OK, &value))
        }
        Asked::Stream(stream) => {
            let handshake = Handshake::read(request.method(), request.headers())?;
            let pipe = limited(server.machines.open(&vm, stream)).await;
            let pipe = pipe.map_err(|refusal| failure(&refusal))?;
            Ok(handshake.finish(request, pipe))
        }
    }
}

async fn act(server: &Server, vm: &VmName, name: &str, body: &[u8]) -> Result<Answer, Failure> {
    #[derive(Deserialize)]
    struct Freeze {
        seconds: u32,
    }
    let action = match name {
        "pause" => Action::Pause,
        "unpause" => Action::Unpause,
        "softreboot" => Action::SoftReboot,
        "reset" => Action::Reset,
        "unfreeze" => Action::Thaw,
        _ => {
            let freeze: Freeze = serde_json::from_slice(body)
                .map_err(|error| Failure::bad_request(format!("seconds are missing: {error}")))?;
            Action::Freeze(freeze.seconds)
        }
    };
    let done = limited(server.machines.act(vm, action)).await;
    match (done, action) {
        (Ok(()), _) => {}
        // What an agent says is an error of the guest, whatever the VM's state.
        (Err(Refusal::State(why)), Action::Freeze(_) | Action::Thaw | Action::Reset) => {
            server.events.failed(vm, action, &why).await;
            return Err(Failure::internal(why));
        }
        (Err(refusal), _) => return Err(failure(&refusal)),
    }
    server.events.done(vm, action).await;
    Ok(https::accepted())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_path_names_a_vm_and_what_is_asked_of_it() {
        let asked = |method, path: &str| parse(&method, path).map(|(_, asked)| asked);
        let (vm, asked_of) = parse(&Method::PUT, "/v1/a/b/c/pause").unwrap();
        assert_eq!(
            (vm.namespace.as_str(), vm.name.as_str(), vm.uid.as_str()),
            ("a", "b", "c")
        );
        assert_eq!(asked_of, Asked::Action("pause"));
        let tcp = Asked::Stream(Stream::Tcp(22));
        assert_eq!(
            asked(Method::GET, "/v1/a/b/c/portforward/22/tcp"),
            Some(tcp)
        );
        for path in [
            "/v1/a/b/c/pause",
            "/v1/a/b/c/portforward/65536/tcp",
            "/v1/a/b/c/portforward/1",
            "/v1/a/b//console",
            "/v1/a/b/c/console/",
            "/v2/a/b/c/console",
            "",
        ] {
            assert_eq!(parse(&Method::GET, path), None, "{path}");
        }
    }
}
