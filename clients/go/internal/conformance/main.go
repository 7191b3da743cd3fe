// The actions of `penstock conformance`.
package main

import (
	"context"
	"encoding/json"
	"errors"
	"log"
	"time"

	penstock "github.com/penstock/penstock/clients/go"
)

type value struct {
	Value json.RawMessage `json:"value"`
}

type failing struct {
	Message string `json:"message"`
	Final   bool   `json:"final"`
}

type lasting struct {
	Seconds float64 `json:"seconds"`
}

func (l lasting) wait(ctx context.Context) error {
	select {
	case <-time.After(time.Duration(l.Seconds * float64(time.Second))):
		return nil
	case <-ctx.Done():
		return ctx.Err()
	}
}

func main() {
	worker, err := penstock.FromEnvironment()
	if err != nil {
		log.Fatal(err)
	}
	penstock.Handle(worker, "conformance.echo", func(ctx context.Context, params value) (any, error) {
		return params.Value, nil
	})
	penstock.Handle(worker, "conformance.fail", func(ctx context.Context, params failing) (any, error) {
		if params.Final {
			return nil, penstock.Fail("%s", params.Message)
		}
		return nil, errors.New(params.Message)
	})
	penstock.Handle(worker, "conformance.sleep", func(ctx context.Context, params lasting) (any, error) {
		return nil, params.wait(ctx)
	})
	penstock.Handle(worker, "conformance.steps", func(ctx context.Context, params lasting) (any, error) {
		var results []string
		for _, name := range []string{"one", "two", "three"} {
			result, err := penstock.Step(ctx, name, func(ctx context.Context) (string, error) {
				return name, params.wait(ctx)
			})
			if err != nil {
				return nil, err
			}
			results = append(results, result)
		}
		return results, nil
	})
	penstock.Handle(worker, "conformance.tenant", func(ctx context.Context, params struct{}) (any, error) {
		return penstock.TaskOf(ctx).Tenant, nil
	})
	if err := worker.Run(context.Background()); err != nil {
		log.Fatal(err)
	}
}
