// A producer and a worker of a hub's queue in Go, with the standard library only.
//
//	atoll ticket new --role program          prints atoll://HOST:PORT/SECRET~MARK
//	go run main.go http://HOST:PORT SECRET
//
// A hub with its own authority: SSL_CERT_FILE=ca.pem, https://...
package main

import (
	"bytes"
	"encoding/json"
	"fmt"
	"log"
	"net/http"
	"os"
)

type client struct{ hub, token string }

// ask sends one request and decodes its answer.
func (c client) ask(verb string, body, answer any) error {
	text, err := json.Marshal(body)
	if err != nil {
		return err
	}
	request, err := http.NewRequest("POST", c.hub+"/api/"+verb, bytes.NewReader(text))
	if err != nil {
		return err
	}
	request.Header.Set("Authorization", "Bearer "+c.token)
	request.Header.Set("Content-Type", "application/json")
	response, err := http.DefaultClient.Do(request)
	if err != nil {
		return err
	}
	defer response.Body.Close()
	if response.StatusCode >= 400 {
		var failed struct{ Error struct{ What, Given string } }
		json.NewDecoder(response.Body).Decode(&failed)
		return fmt.Errorf("%s: %s %s", verb, failed.Error.What, failed.Error.Given)
	}
	return json.NewDecoder(response.Body).Decode(answer)
}

type item struct {
	Value struct{ Seed int }
	Lease string
}

func main() {
	if len(os.Args) != 3 {
		log.Fatal("usage: go run main.go HUB SECRET")
	}
	hub := client{hub: os.Args[1]}
	var login struct{ Token string }
	must(hub.ask("login", map[string]any{"secret": os.Args[2], "name": "go"}, &login))
	hub.token = login.Token

	const queue = "pool/seeds"
	for seed := 1; seed <= 3; seed++ {
		var stored struct {
			Seq       int
			Duplicate bool
		}
		must(hub.ask("queues/put", map[string]any{
			"queue": queue, "key": fmt.Sprint("seed-", seed), "value": map[string]int{"seed": seed},
		}, &stored))
	}

	var claimed struct{ Items []item }
	must(hub.ask("queues/claim", map[string]any{"queue": queue, "limit": 10, "wait_s": 5}, &claimed))
	for _, one := range claimed.Items {
		fmt.Println("seed", one.Value.Seed)
		must(hub.ask("queues/ack", map[string]any{"queue": queue, "lease": one.Lease}, &struct{}{}))
	}
}

func must(err error) {
	if err != nil {
		log.Fatal(err)
	}
}
