// The same over one WebSocket: no connection per request, and answers come as they are ready.
//   node socket.mjs ws://HOST:PORT TOKEN          Node 22 or later, a browser (Node 20:
//                                                 node --experimental-websocket socket.mjs ...)
// TOKEN is the answer of POST /api/login, or `client.token` in Python.
const [hub, token] = process.argv.slice(2);
const socket = new WebSocket(`${hub}/api/queues/socket`);
const waiting = new Map();
let last = 0;

function ask(verb, fields) {
  return new Promise((done, failed) => {
    waiting.set(++last, [done, failed]);
    socket.send(JSON.stringify({ id: last, do: verb, ...fields }));
  });
}

await new Promise((opened) => { socket.onopen = opened; });
const welcome = new Promise((greeted, failed) => waiting.set(undefined, [greeted, failed]));
socket.onmessage = ({ data }) => {
  const { id, done, error, welcome: version } = JSON.parse(data);
  const [resolve, reject] = waiting.get(id ?? undefined);
  waiting.delete(id ?? undefined);
  if (error) reject(new Error(`${error.what}: ${error.given ?? ""}`));
  else resolve(done ?? version);
};
socket.send(JSON.stringify({ token }));
await welcome;

// A claim that waits holds up nothing: the put after it is what it waits for.
const claimed = ask("claim", { queue: "pool/later", wait_s: 30 });
await ask("put", { queue: "pool/later", value: "hello" });
const { items } = await claimed;
await ask("ack", { queue: "pool/later", lease: items[0].lease });

await ask("read", { topic: "pool/news", subscription: "js", limit: 0 });  // subscribes
await ask("publish", { topic: "pool/news", items: [{ value: { round: 1 } }] });
const news = await ask("read", { topic: "pool/news", subscription: "js", wait_s: 30 });
await ask("topic_ack", { topic: "pool/news", subscription: "js", seq: news.items[0].seq });
console.log(`${items[0].value}, round ${news.items[0].value.round}`);
socket.close();
