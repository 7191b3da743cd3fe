// A worker with a handler that retries and one in durable steps.
package main

import (
	"context"
	"log"
	"strings"
	"time"

	penstock "github.com/penstock/penstock/clients/go"
)

type receipt struct {
	Order int    `json:"order"`
	To    string `json:"to"`
}

type order struct {
	Item string `json:"item"`
	Card string `json:"card"`
}

func main() {
	worker, err := penstock.FromEnvironment()
	if err != nil {
		log.Fatal(err)
	}
	penstock.Handle(worker, "receipt", sendReceipt, penstock.Timeout(30*time.Second))
	penstock.Handle(worker, "order", ship)
	if err := worker.Run(context.Background()); err != nil { // until SIGTERM
		log.Fatal(err)
	}
}

func sendReceipt(ctx context.Context, params receipt) (any, error) {
	if !strings.Contains(params.To, "@") {
		return nil, penstock.Fail("%q is not an address", params.To) // fails at once
	}
	if isBusy() {
		return nil, penstock.Retry(time.Minute, "the mail server is busy") // any other error is retried with backoff
	}
	if err := penstock.TaskOf(ctx).Progress(ctx, 40, "rendered"); err != nil {
		return nil, err
	}
	return map[string]any{"order": params.Order, "sent_to": params.To}, nil
}

func ship(ctx context.Context, params order) (any, error) {
	reference := "order-" + penstock.TaskOf(ctx).ID
	charge, err := penstock.Step(ctx, "charge", func(ctx context.Context) (string, error) {
		return chargeCard(params.Card, reference) // never again once reported
	})
	if err != nil {
		return nil, err
	}
	if err := penstock.Sleep(ctx, time.Hour); err != nil { // ends the attempt and suspends the task
		return nil, err
	}
	return penstock.Step(ctx, "ship", func(ctx context.Context) (string, error) {
		return params.Item + " paid by " + charge, nil
	})
}

func isBusy() bool { return false }

func chargeCard(card, reference string) (string, error) { return "charge of " + reference, nil }
