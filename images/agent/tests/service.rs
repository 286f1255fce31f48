//! The agent as an ordinary process: what it answers to a host that makes mistakes.

use std::sync::Arc;

use podvisor_agent::reaper;
use podvisor_agent::server::{self, Listeners};
use podvisor_agent::service::Service;
use podvisor_agent::stdio::StreamRegistry;
use podvisor_agent_protocol::api::{self, AgentClient};
use podvisor_agent_protocol::{AgentError, ErrorKind, limits};
use serde_json::json;
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::{UnixListener, UnixStream};
use ttrpc::asynchronous::{Client, transport::Socket};
use ttrpc::context::{Context, with_timeout};

struct Guest {
    agent: AgentClient,
    directory: tempfile::TempDir,
}

impl Guest {
    async fn new() -> Self {
        let directory = tempfile::tempdir().unwrap();
        let listen = |name: &str| UnixListener::bind(directory.path().join(name)).unwrap();
        let listeners = Listeners::unix(listen("rpc"), listen("stdio"));
        let (reaper, reaping) = reaper::start().unwrap();
        tokio::spawn(reaping);
        let hub = StreamRegistry::new();
        let service = Arc::new(Service::new(reaper, hub.clone()));
        tokio::spawn(server::serve(listeners, service, hub));
        let stream = UnixStream::connect(directory.path().join("rpc"))
            .await
            .unwrap();
        Self {
            agent: AgentClient::new(Client::new(Socket::new(stream))),
            directory,
        }
    }
}

fn no_timeout() -> Context {
    with_timeout(0)
}

fn kind<T: std::fmt::Debug>(answer: ttrpc::Result<T>) -> ErrorKind {
    AgentError::from(answer.unwrap_err()).kind
}

fn create(spec: serde_json::Value) -> api::CreateContainerRequest {
    api::CreateContainerRequest {
        container_id: "web".into(),
        image_serial: "img0".into(),
        spec_json: serde_json::to_vec(&spec).unwrap(),
        ..Default::default()
    }
}

fn spec() -> serde_json::Value {
    json!({
        "ociVersion": "1.2.0",
        "process": {"args": ["true"], "cwd": "/", "user": {"uid": 0, "gid": 0}},
        "linux": {"namespaces": [{"type": "mount"}]}
    })
}

#[tokio::test]
async fn containers_that_do_not_exist_are_not_found() {
    let guest = Guest::new().await;
    let agent = &guest.agent;
    let container_id = "nobody".to_owned();

    let start = api::StartContainerRequest {
        container_id: container_id.clone(),
        ..Default::default()
    };
    assert_eq!(
        kind(agent.start_container(no_timeout(), &start).await),
        ErrorKind::NotFound
    );
    let wait = api::WaitProcessRequest {
        container_id: container_id.clone(),
        ..Default::default()
    };
    assert_eq!(
        kind(agent.wait_process(no_timeout(), &wait).await),
        ErrorKind::NotFound
    );
    let stats = api::ContainerStatsRequest {
        container_id: container_id.clone(),
        ..Default::default()
    };
    assert_eq!(
        kind(agent.container_stats(no_timeout(), &stats).await),
        ErrorKind::NotFound
    );
    let signal = api::SignalProcessRequest {
        container_id: container_id.clone(),
        signal: 15,
        ..Default::default()
    };
    assert_eq!(
        kind(agent.signal_process(no_timeout(), &signal).await),
        ErrorKind::NotFound
    );

    // Deleting is idempotent.
    let delete = api::DeleteContainerRequest {
        container_id,
        ..Default::default()
    };
    agent.delete_container(no_timeout(), &delete).await.unwrap();
    let list = agent
        .list_containers(no_timeout(), &Default::default())
        .await
        .unwrap();
    assert!(list.containers.is_empty());
}

#[tokio::test]
async fn malformed_requests_are_refused_before_anything_is_done() {
    let guest = Guest::new().await;
    let mut requests = Vec::new();
    for id in ["", "../x", "a/b", &"x".repeat(129)] {
        requests.push(api::CreateContainerRequest {
            container_id: id.into(),
            ..create(spec())
        });
    }
    for serial in ["", "with space", &"x".repeat(21)] {
        let image_serial = serial.into();
        requests.push(api::CreateContainerRequest {
            image_serial,
            ..create(spec())
        });
    }
    requests.push(create(json!({})));
    requests.push(create(json!("spec")));
    let mut hooks = spec();
    hooks["hooks"] = json!({"poststart": [{"path": "/bin/true"}]});
    requests.push(create(hooks));
    let mut devices = spec();
    devices["linux"]["resources"] = json!({"devices": [{"allow": true, "access": "exec"}]});
    requests.push(create(devices));
    let mut huge = create(spec());
    huge.spec_json = vec![b' '; limits::SPEC_BYTES + 1];
    requests.push(huge);
    let mut streams = create(spec());
    streams.stdio.mut_or_insert_default().stdout = vec![1, 2, 3];
    requests.push(streams);
    for request in requests {
        let answer = guest.agent.create_container(no_timeout(), &request).await;
        assert_eq!(
            kind(answer),
            ErrorKind::InvalidArgument,
            "{}",
            request.container_id
        );
    }
}

#[tokio::test]
async fn configuration_out_of_bounds_changes_nothing() {
    let guest = Guest::new().await;
    let before = rustix::system::uname();
    for request in [
        api::ConfigureRequest {
            hostname: "x".repeat(65),
            ..Default::default()
        },
        api::ConfigureRequest {
            hostname: "a b".into(),
            ..Default::default()
        },
        api::ConfigureRequest {
            unix_time_ns: u64::MAX,
            ..Default::default()
        },
        api::ConfigureRequest {
            hostname: "changed".into(),
            entropy: vec![0; limits::ENTROPY_BYTES + 1],
            ..Default::default()
        },
    ] {
        let answer = guest.agent.configure(no_timeout(), &request).await;
        assert_eq!(kind(answer), ErrorKind::InvalidArgument);
    }
    assert_eq!(rustix::system::uname().nodename(), before.nodename());
    guest
        .agent
        .configure(no_timeout(), &Default::default())
        .await
        .unwrap();
}

#[tokio::test]
async fn addresses_of_devices_are_no_paths() {
    let guest = Guest::new().await;
    for address in ["", "../..", "0000:00:05.0/../../../devices"] {
        let request = api::RemoveDevicesRequest {
            addresses: vec!["ffff:00:1f.7".to_owned(), address.to_owned()],
            ..Default::default()
        };
        let answer = guest.agent.remove_devices(no_timeout(), &request).await;
        assert_eq!(kind(answer), ErrorKind::InvalidArgument, "{address:?}");
    }
}

#[tokio::test]
async fn signals_and_sizes_out_of_range_are_refused() {
    let guest = Guest::new().await;
    for signal in [0, 65, 256 + 9] {
        let request = api::SignalProcessRequest {
            signal,
            ..Default::default()
        };
        let answer = guest.agent.signal_process(no_timeout(), &request).await;
        assert_eq!(kind(answer), ErrorKind::InvalidArgument);
    }
    for (columns, rows) in [(0, 24), (80, 0), (65536, 24)] {
        let request = api::ResizeTerminalRequest {
            columns,
            rows,
            ..Default::default()
        };
        let answer = guest.agent.resize_terminal(no_timeout(), &request).await;
        assert_eq!(kind(answer), ErrorKind::InvalidArgument);
    }
}

#[tokio::test]
async fn noise_on_the_sockets_leaves_the_agent_serving() {
    use tokio::io::AsyncWriteExt as _;
    let guest = Guest::new().await;
    for name in ["rpc", "stdio"] {
        for noise in [&[0u8; 64][..], &[0xff; 64], b"GET / HTTP/1.1\r\n\r\n"] {
            let mut stream = UnixStream::connect(guest.directory.path().join(name))
                .await
                .unwrap();
            // The agent may hang up in the middle.
            let _ = stream.write_all(noise).await;
        }
    }
    guest
        .agent
        .list_containers(no_timeout(), &Default::default())
        .await
        .unwrap();
}

#[tokio::test]
async fn networks_shares_and_parameters_out_of_bounds_are_refused() {
    let guest = Guest::new().await;
    let interface = |mac: &str, name: &str| api::Interface {
        mac: mac.into(),
        name: name.into(),
        ..Default::default()
    };
    let requests = [
        api::ConfigureRequest {
            interfaces: vec![interface("no-mac", "eth0")],
            ..Default::default()
        },
        api::ConfigureRequest {
            routes: vec![api::Route {
                destination: "0.0.0.0/0".into(),
                interface: "eth9".into(),
                ..Default::default()
            }],
            ..Default::default()
        },
        api::ConfigureRequest {
            shares: vec![api::Share {
                tag: "shared".into(),
                path: "/etc".into(),
                ..Default::default()
            }],
            ..Default::default()
        },
        api::ConfigureRequest {
            sysctls: [("net/../../x".to_owned(), "1".to_owned())].into(),
            hostname: "changed".into(),
            ..Default::default()
        },
    ];
    let before = rustix::system::uname();
    for request in requests {
        let answer = guest.agent.configure(no_timeout(), &request).await;
        assert_eq!(kind(answer), ErrorKind::InvalidArgument, "{request:?}");
    }
    assert_eq!(rustix::system::uname().nodename(), before.nodename());
    let clock = api::SetClockRequest {
        unix_time_ns: u64::MAX,
        ..Default::default()
    };
    let answer = guest.agent.set_clock(no_timeout(), &clock).await;
    assert_eq!(kind(answer), ErrorKind::InvalidArgument);
}

#[tokio::test]
async fn limits_of_a_container_that_does_not_exist_are_not_found() {
    let guest = Guest::new().await;
    for (json, expected) in [
        ("{}", ErrorKind::NotFound),
        ("true", ErrorKind::InvalidArgument),
    ] {
        let update = api::UpdateContainerResourcesRequest {
            container_id: "nobody".into(),
            resources_json: json.into(),
            ..Default::default()
        };
        let answer = guest
            .agent
            .update_container_resources(no_timeout(), &update)
            .await;
        assert_eq!(kind(answer), expected);
    }
}

#[tokio::test]
async fn a_port_is_forwarded_with_half_close_in_both_directions() {
    let guest = Guest::new().await;
    for host in ["127.0.0.1:0", "[::1]:0"] {
        let listener = tokio::net::TcpListener::bind(host).await.unwrap();
        let request = api::PortForwardRequest {
            stream: vec![9; 16],
            port: listener.local_addr().unwrap().port().into(),
            ..Default::default()
        };
        guest
            .agent
            .port_forward(no_timeout(), &request)
            .await
            .unwrap();
        let (mut server, _) = listener.accept().await.unwrap();
        let mut stream = UnixStream::connect(guest.directory.path().join("stdio"))
            .await
            .unwrap();
        stream.write_all(&[9; 16]).await.unwrap();
        stream.write_all(b"question").await.unwrap();
        stream.shutdown().await.unwrap();
        let mut heard = String::new();
        server.read_to_string(&mut heard).await.unwrap();
        assert_eq!(heard, "question");
        server.write_all(b"answer").await.unwrap();
        drop(server);
        heard.clear();
        stream.read_to_string(&mut heard).await.unwrap();
        assert_eq!(heard, "answer");
    }
}

#[tokio::test]
async fn ports_where_nobody_listens_and_bad_requests_have_their_own_kinds() {
    let guest = Guest::new().await;
    // Bound, so that nobody else listens there, and not listening.
    let socket = tokio::net::TcpSocket::new_v4().unwrap();
    socket.bind("127.0.0.1:0".parse().unwrap()).unwrap();
    let free = socket.local_addr().unwrap().port();
    for (stream, port, expected) in [
        (vec![8; 16], u32::from(free), ErrorKind::ConnectionRefused),
        (vec![8; 16], 0, ErrorKind::InvalidArgument),
        (vec![8; 16], 65_536, ErrorKind::InvalidArgument),
        (vec![], 80, ErrorKind::InvalidArgument),
        (vec![8; 15], 80, ErrorKind::InvalidArgument),
    ] {
        let request = api::PortForwardRequest {
            stream,
            port,
            ..Default::default()
        };
        let answer = guest.agent.port_forward(no_timeout(), &request).await;
        assert_eq!(kind(answer), expected, "{port}");
    }
}
