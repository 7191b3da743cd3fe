package penstock

import (
	"context"
	"fmt"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"
)

const roleAnswer = `{"AccessKeyId":"id","SecretAccessKey":"secret","Token":"token","Expiration":"2999-01-01T00:00:00Z"}`

func providerOf(variables map[string]string) *provider {
	return &provider{getenv: func(name string) string { return variables[name] }, region: "eu-west-1"}
}

// serve answers by "METHOD path header value", with the header's name given for each path; anything else is 403.
func serve(t *testing.T, header string, answers map[string]string) string {
	server := httptest.NewServer(http.HandlerFunc(func(answer http.ResponseWriter, request *http.Request) {
		text, ok := answers[strings.TrimSpace(request.Method+" "+request.URL.Path+" "+request.Header.Get(header))]
		if !ok {
			answer.WriteHeader(http.StatusForbidden)
			text = "secret of the body"
		}
		fmt.Fprint(answer, text)
	}))
	t.Cleanup(server.Close)
	return server.URL
}

func expect(t *testing.T, p *provider, wanted credentials) {
	t.Helper()
	found, err := p.get(context.Background())
	if err != nil || found.AccessKeyID != wanted.AccessKeyID || found.SecretAccessKey != wanted.SecretAccessKey || found.Token != wanted.Token {
		t.Error(found, err)
	}
}

func tokenFile(t *testing.T) string {
	file := filepath.Join(t.TempDir(), "token")
	if err := os.WriteFile(file, []byte("sesame\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	return file
}

func TestCredentialsOfTheEnvironment(t *testing.T) {
	expect(t, providerOf(map[string]string{"PENSTOCK_SQS_ACCESS_KEY": "a:b", "AWS_ACCESS_KEY_ID": "c"}), credentials{"a", "b", "", time.Time{}})
	variables := map[string]string{"AWS_ACCESS_KEY_ID": "a", "AWS_SECRET_ACCESS_KEY": "b", "AWS_SESSION_TOKEN": "c"}
	expect(t, providerOf(variables), credentials{"a", "b", "c", time.Time{}})
}

func TestCredentialsOfAContainerAreKept(t *testing.T) {
	url := serve(t, "Authorization", map[string]string{"GET /role sesame": roleAnswer})
	variables := map[string]string{
		"AWS_CONTAINER_CREDENTIALS_FULL_URI": url + "/role", "AWS_CONTAINER_AUTHORIZATION_TOKEN_FILE": tokenFile(t),
	}
	p := providerOf(variables)
	expect(t, p, credentials{"id", "secret", "token", time.Time{}})
	delete(variables, "AWS_CONTAINER_CREDENTIALS_FULL_URI")
	expect(t, p, credentials{"id", "secret", "token", time.Time{}})
}

func TestCredentialsOfAnInstance(t *testing.T) {
	roles := "/latest/meta-data/iam/security-credentials/"
	url := serve(t, "X-Aws-Ec2-Metadata-Token", map[string]string{
		"PUT /latest/api/token": "sesame", "GET " + roles + " sesame": "worker\n", "GET " + roles + "worker sesame": roleAnswer,
	})
	expect(t, providerOf(map[string]string{"AWS_EC2_METADATA_SERVICE_ENDPOINT": url}), credentials{"id", "secret", "token", time.Time{}})
}

func TestCredentialsOfAWebIdentity(t *testing.T) {
	url := serve(t, "Content-Type", map[string]string{"POST / application/x-www-form-urlencoded": `
		<AssumeRoleWithWebIdentityResponse xmlns="https://sts.amazonaws.com/doc/2011-06-15/"><AssumeRoleWithWebIdentityResult>
		<Credentials><AccessKeyId>id</AccessKeyId><SecretAccessKey>secret</SecretAccessKey><SessionToken>token</SessionToken>
		<Expiration>2999-01-01T00:00:00Z</Expiration></Credentials></AssumeRoleWithWebIdentityResult></AssumeRoleWithWebIdentityResponse>`})
	p := providerOf(map[string]string{
		"AWS_WEB_IDENTITY_TOKEN_FILE": tokenFile(t), "AWS_ROLE_ARN": "arn:aws:iam::1:role/worker", "AWS_ENDPOINT_URL_STS": url,
	})
	expect(t, p, credentials{"id", "secret", "token", time.Time{}})
	if p.kept.Expiration.Year() != 2999 {
		t.Error(p.kept.Expiration)
	}
}

func TestARefusalSaysWhereAndNotWhat(t *testing.T) {
	url := serve(t, "Authorization", nil)
	_, err := providerOf(map[string]string{"AWS_CONTAINER_CREDENTIALS_FULL_URI": url}).get(context.Background())
	if err == nil || !strings.Contains(err.Error(), "403") || strings.Contains(err.Error(), "secret") {
		t.Error(err)
	}
	_, err = providerOf(map[string]string{"AWS_EC2_METADATA_DISABLED": "true"}).get(context.Background())
	if err == nil || !strings.Contains(err.Error(), "set AWS_ACCESS_KEY_ID") {
		t.Error(err)
	}
}

func TestASourceThatFailsIsNotAskedByEachCallWhileCredentialsHold(t *testing.T) {
	asked := 0
	server := httptest.NewServer(http.HandlerFunc(func(answer http.ResponseWriter, _ *http.Request) {
		asked++
		answer.WriteHeader(http.StatusForbidden)
	}))
	t.Cleanup(server.Close)
	p := providerOf(map[string]string{"AWS_CONTAINER_CREDENTIALS_FULL_URI": server.URL + "/role"})
	p.kept = credentials{"id", "secret", "token", time.Now().Add(2 * time.Minute)}
	for i := 0; i < 2; i++ {
		expect(t, p, p.kept)
	}
	if asked != 1 {
		t.Error(asked)
	}
}
